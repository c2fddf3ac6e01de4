#include "layer/meeting.hpp"

#include <algorithm>

#include "heddle/error.hpp"

namespace heddle {

Meeting::Meeting(int first_rank, int members, std::chrono::nanoseconds deadline)
    : first_rank_(first_rank), deadline_(deadline), here_(static_cast<std::size_t>(members), false) {}

void Meeting::meet(int rank, const std::string& what, const std::function<void()>& work) {
  std::unique_lock lock(mutex_);
  if (over_) std::rethrow_exception(over_);
  here_[static_cast<std::size_t>(rank - first_rank_)] = true;
  ++came_;
  complete() ? work_for_all(lock, work) : wait(lock, rank, what);
}

void Meeting::work_for_all(std::unique_lock<std::mutex>& lock, const std::function<void()>& work) {
  std::exception_ptr error;
  lock.unlock();
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error && !over_) over_ = error;
  came_ = 0;
  std::fill(here_.begin(), here_.end(), false);
  ++meetings_;
  changed_.notify_all();
  if (over_) std::rethrow_exception(over_);
}

void Meeting::wait(std::unique_lock<std::mutex>& lock, int rank, const std::string& what) {
  const auto end = std::chrono::steady_clock::now() + deadline_;
  const std::uint64_t mine = meetings_;
  while (meetings_ == mine && (complete() || !over_)) {
    if (complete()) {  // the work ends by deadlines of its own
      changed_.wait(lock);
      continue;
    }
    const bool late = changed_.wait_until(lock, end) == std::cv_status::timeout;
    if (!late || meetings_ != mine || complete() || over_) continue;
    const auto absent = static_cast<int>(std::find(here_.begin(), here_.end(), false) - here_.begin());
    over_ = std::make_exception_ptr(FaultError({rank, first_rank_ + absent, what, "call", here_.size(), came_}));
    changed_.notify_all();
  }
  if (over_) std::rethrow_exception(over_);
}

void Meeting::end(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (!over_) over_ = error;
  changed_.notify_all();
}

void Meeting::begin_again() {
  const std::lock_guard lock(mutex_);
  over_ = nullptr;
  came_ = 0;
  std::fill(here_.begin(), here_.end(), false);
}

}  // namespace heddle
