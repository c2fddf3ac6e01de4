// Where the time of a trace goes: per role what it did and what it waited for. What is inside of another span is not counted twice:
// the lines of a role and its idle time add up to the time its lanes were there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trace/span.hpp"

namespace heddle::trace {

/// One thing that a role did, or one that it waited for.
struct Line {
  std::string what;
  std::string during;  ///< what a wait held up, or its word's phase; "shared expert" where that is whose products they are; or ""
  bool is_wait = false;
  std::int64_t count = 0;  ///< spans; of summed waits the spans that had some
  std::int64_t nanoseconds = 0;
};

struct RoleTotals {
  Role role = Role::rank;
  std::string kernel;  ///< on GPUs
  int lanes = 0;
  std::int64_t begin = 0;        ///< of the first lane
  std::int64_t end = 0;          ///< of the last one
  std::int64_t nanoseconds = 0;  ///< that these lanes were there
  std::int64_t idle = 0;         ///< of that, outside of any span
  std::vector<Line> lines;       ///< the longest first
};

struct Totals {
  std::int64_t nanoseconds = 0;  ///< from the first lane's begin to the last one's end
  std::int64_t spans = 0;
  std::int64_t lost = 0;
  std::vector<RoleTotals> roles;
};

Totals totals_of(const Trace& trace);

/// What a span spent neither in spans inside of it nor in summed waits, for each of a lane's spans. Throws std::logic_error where
/// two spans overlap in part.
std::vector<std::int64_t> own_times(const Lane& lane);
/// The span right around each one, -1: none.
std::vector<int> parents_of(const Lane& lane);

}  // namespace heddle::trace
