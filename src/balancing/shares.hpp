// The arithmetic of sharing rows out among copies, for host and device.
#pragma once

#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle {

/// Rounds of CopyRule::levelled: a third one hardly changes anything (docs/balancing.md).
constexpr int levelling_rounds = 2;

/// Places of `rank` behind `source`, going round.
HEDDLE_HOST_DEVICE constexpr int places_behind(int rank, int source, int ranks) { return (rank + ranks - source % ranks) % ranks; }

/// Where rows dealt one by one, each to the lowest of some levels, end up. Only levels that are reached get any: those that there
/// are enough rows for to fill all lower ones up to them.
struct Dealt {
  std::int64_t rows = 0;     ///< and the levels that they reach, together
  std::int64_t reached = 0;  ///< how many levels

  HEDDLE_HOST_DEVICE void add(int level) {
    rows += level;
    ++reached;
  }
  HEDDLE_HOST_DEVICE int even() const { return static_cast<int>(rows / reached); }
  HEDDLE_HOST_DEVICE int rest() const { return static_cast<int>(rows % reached); }
  /// Rows for a level that is reached; `before`: reached ones that come before it in ties.
  HEDDLE_HOST_DEVICE int share(int level, int before) const { return even() - level + (before < rest() ? 1 : 0); }
};

/// Rows of copy `copy` of `copies` that take turns.
HEDDLE_HOST_DEVICE constexpr int turns_of_copy(int rows, int copy, int copies, int source, int expert) {
  return rows / copies + ((copy + copies - (source + expert) % copies) % copies < rows % copies ? 1 : 0);
}

}  // namespace heddle
