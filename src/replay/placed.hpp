// Experts on ranks where an expert may have several copies, and a placement of them that evens out known loads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "heddle/routing.hpp"

namespace heddle::replay {

/// Which ranks hold each expert: at least one. The tokens that choose an expert of several copies take turns.
class Placed {
 public:
  /// One copy of each.
  explicit Placed(const Placement& placement);
  /// ranks_of[expert]: ranks that hold it.
  Placed(std::vector<std::vector<int>> ranks_of, int ranks);

  int experts() const { return static_cast<int>(ranks_of_.size()); }
  int ranks() const { return ranks_; }
  const std::vector<int>& ranks_of(int expert) const { return ranks_of_[static_cast<std::size_t>(expert)]; }
  int rank_of(int expert, int token) const {
    const std::vector<int>& ranks = ranks_of(expert);
    return ranks[static_cast<std::size_t>(token) % ranks.size()];
  }

 private:
  std::vector<std::vector<int>> ranks_of_;
  int ranks_;
};

/// A static greedy placement of experts whose loads are known (rows, in any unit), with `replicas` copies more than experts: each
/// further copy goes to the expert whose copies have most to do, of those that are not on every rank yet. Then copies are placed by
/// falling load, each on the rank that has least to do of those with room (no rank holds more than its even share, rounded up) and
/// without that expert. This is how DeepSeek's EPLB (github.com/deepseek-ai/EPLB) goes about it, without groups and nodes. Throws
/// InputError for no ranks, negative loads or replicas, or more copies than experts times ranks.
Placed place_greedily(std::span<const double> loads, int ranks, int replicas);

}  // namespace heddle::replay
