// A rank whose workers stop in the middle of a call.
#pragma once

#include <condition_variable>
#include <mutex>

namespace heddle {

/// Stops the workers of one rank before a chosen verb, until it is let go. Counts verbs otherwise.
class Stall {
 public:
  void stop_at(int verb) {
    const std::lock_guard lock(mutex_);
    stop_at_ = verb;
    verbs_ = 0;
    open_ = false;
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    gate_.notify_all();
  }
  void wait_at_the_gate() {
    std::unique_lock lock(mutex_);
    gate_.wait(lock, [this] { return open_; });
  }
  int verbs() {
    const std::lock_guard lock(mutex_);
    return verbs_;
  }
  void before_verb() {
    std::unique_lock lock(mutex_);
    if (verbs_++ == stop_at_) gate_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable gate_;
  int stop_at_ = -1;
  int verbs_ = 0;
  bool open_ = false;
};

}  // namespace heddle
