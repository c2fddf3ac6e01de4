// A look at the loads: which placement would even them out, and what that is worth.
#pragma once

#include <cstdint>
#include <span>

#include "heddle/balancing.hpp"

namespace heddle {

struct Look {
  ReplicaMap wanted;
  double imbalance = 0;  ///< max/mean of rows by rank under the placement in force, if one source had brought all pairs
  double expected = 0;   ///< likewise under the wanted one
};

/// counts [experts]: pairs of all ranks. The same numbers lead to the same placement everywhere.
Look look_at(const ReplicaMap& map, const BalancingOptions& options, std::span<const std::int64_t> counts);

/// Throws InputError for a layer that cannot be balanced so in a group of `group_nodes` nodes, numbers in the message.
void check_balancing(const LayerShape& shape, const ReplicaMap& map, const LayerOptions& layer, const BalancingOptions& options,
                     int group_nodes);

/// What members must agree on, one "name=value" a line.
std::string describe_balancing(const ReplicaMap& map, const BalancingOptions& options);

}  // namespace heddle
