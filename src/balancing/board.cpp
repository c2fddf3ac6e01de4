#include "balancing/board.hpp"

#include <algorithm>
#include <atomic>

namespace heddle {

namespace {
constexpr std::size_t counts_begin = align_up(2 * sizeof(Word), 128);
}

BalancingBoard::BalancingBoard(Group& members, int experts)
    : members_(members),
      experts_(static_cast<std::size_t>(experts)),
      counts_stride_(align_up(experts_ * sizeof(std::int64_t), 128)),
      heap_(members.create_heap(counts_begin + 2 * counts_stride_)) {}

Word& BalancingBoard::ready(int member, std::int64_t change) const { return heap_.view.at<Word>(member, 0)[change % 2]; }

std::int64_t* BalancingBoard::counts_of(int member, std::int64_t look) const {
  return heap_.view.at<std::int64_t>(member, counts_begin + static_cast<std::size_t>(look % 2) * counts_stride_);
}

void BalancingBoard::tell_counts(std::int64_t look, std::span<const std::int64_t> counts) {
  std::ranges::copy(counts, counts_of(members_.rank(), look));
}

std::vector<std::int64_t> BalancingBoard::all_counts(std::int64_t look) const {
  std::vector<std::int64_t> all(experts_, 0);
  for (int member = 0; member < members_.ranks(); ++member) {
    const std::int64_t* theirs = counts_of(member, look);
    for (std::size_t expert = 0; expert < experts_; ++expert) all[expert] += theirs[expert];
  }
  return all;
}

void BalancingBoard::say_ready(std::int64_t change, std::int64_t call) {
  std::atomic_ref<Word>(ready(members_.rank(), change)).store(static_cast<Word>(call), std::memory_order_release);
}

bool BalancingBoard::all_ready(std::int64_t change, std::int64_t began, std::int64_t seen) const {
  for (int member = 0; member < members_.ranks(); ++member) {
    if (!members_.live()[static_cast<std::size_t>(member)]) continue;
    const auto said = static_cast<std::int64_t>(std::atomic_ref<Word>(ready(member, change)).load(std::memory_order_acquire));
    if (said <= began || said > seen) return false;
  }
  return true;
}

void BalancingBoard::close() { members_.release_heap(heap_); }

}  // namespace heddle
