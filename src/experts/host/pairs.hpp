// The one form that all arrived layouts are brought into: (token, expert) pairs sorted by expert.
#pragma once

#include <vector>

namespace heddle {

/// Pairs in the order of the flat list: expert 0's first. Pair i is row source[i] of the arrived rows and
/// its result is row target[i] of the output.
struct PairList {
  std::vector<int> masked_m;  ///< pairs of each local expert
  std::vector<int> source;
  std::vector<int> target;
  std::vector<float> weights;  ///< one a pair; empty: 1
  int most_rows = 0;           ///< the pairs there could have been: the padded grid's blocks

  int count() const { return static_cast<int>(source.size()); }

  void clear(int experts) {
    masked_m.assign(static_cast<std::size_t>(experts), 0);
    source.clear();
    target.clear();
    weights.clear();
    most_rows = 0;
  }
};

}  // namespace heddle
