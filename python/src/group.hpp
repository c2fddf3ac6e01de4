// A group as Python holds it: shared by all that is made of it, used by one thread at a time.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "heddle/group.hpp"
#include "sharing.hpp"

namespace heddle::python {

/// A deadline in seconds as Python gives it; throws InputError.
inline std::chrono::milliseconds deadline_of(double seconds) {
  if (!(seconds > 0) || seconds > 1e6)
    throw InputError(fmt::format("a deadline of {} s: expected a number of seconds above 0, at most 1e6", seconds));
  return std::chrono::milliseconds(std::max(1LL, std::llround(seconds * 1e3)));
}

/// One rank's membership, used by one thread at a time.
class RankGroup {
 public:
  explicit RankGroup(std::unique_ptr<Group> group)
      : group_(std::move(group)), place_("rank", fmt::format("rank {}", group_->rank())) {}
  Group& group() { return *group_; }

  struct Turn : python::Turn {
    Turn(RankGroup& of, const char* what) : python::Turn(of.place_, what) {}
  };

 private:
  std::unique_ptr<Group> group_;
  Place place_;
};

}  // namespace heddle::python
