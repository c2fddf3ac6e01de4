// Where a size lies among those that a way was measured at.
#pragma once

#include "heddle/tuning.hpp"

namespace heddle {

struct MeasuredAround {
  const TuningRow* below = nullptr;  ///< the largest smaller one, if there is one
  const TuningRow* above = nullptr;  ///< the smallest that is as large or larger, if there is one
};

inline MeasuredAround measured_around(const TuningEntry& entry, Way way, int max_tokens) {
  MeasuredAround around;
  for (const TuningRow& row : entry.rows) {
    if (row.us.count(way) == 0) continue;
    if (row.max_tokens >= max_tokens) {
      around.above = &row;
      break;
    }
    around.below = &row;
  }
  return around;
}

}  // namespace heddle
