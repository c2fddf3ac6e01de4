// A group as Python holds it: shared by all that is made of it, used by one thread at a time.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "heddle/group.hpp"

namespace heddle::python {

/// A deadline in seconds as Python gives it; throws InputError.
inline std::chrono::milliseconds deadline_of(double seconds) {
  if (!(seconds > 0) || seconds > 1e6)
    throw InputError(fmt::format("a deadline of {} s: expected a number of seconds above 0, at most 1e6", seconds));
  return std::chrono::milliseconds(std::max(1LL, std::llround(seconds * 1e3)));
}

/// One rank's membership. Calls run without the GIL, so a second thread could come in: it is refused.
class RankGroup {
 public:
  explicit RankGroup(std::unique_ptr<Group> group) : group_(std::move(group)) {}
  Group& group() { return *group_; }

  /// One thread's turn, from here to the end of the scope.
  class Turn {
   public:
    Turn(RankGroup& of, const char* what) : of_(of) {
      if (!of_.busy_.test_and_set(std::memory_order_acquire)) return;
      throw InputError(
          fmt::format("{} on rank {}: another thread is inside a call of this rank; give every rank a thread of its own", what,
                      of_.group_->rank()));
    }
    ~Turn() { of_.busy_.clear(std::memory_order_release); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    RankGroup& of_;
  };

 private:
  std::unique_ptr<Group> group_;
  std::atomic_flag busy_;
};

}  // namespace heddle::python
