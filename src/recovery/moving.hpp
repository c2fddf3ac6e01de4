// Experts that move with the mask: what either engine does about placements.
#pragma once

#include <span>
#include <vector>

#include "heddle/recovery.hpp"

namespace heddle {

/// Throws InputError for a layer that cannot do without a rank.
void check_movable(const ContextLayer& layer);

/// Gives `layers`, which are `original` but for their placements, those of a mask of ranks. How many experts are new to the ranks
/// [first_rank, first_rank + ranks).
int place_experts(std::vector<ContextLayer>& layers, const std::vector<ContextLayer>& original, const Rehome& rehome,
                  const std::vector<bool>& live, int first_rank, int ranks);

/// Without the ranks that are not live: the others are numbered anew, in order.
Placement without_gaps(const Placement& placement, const std::vector<bool>& live);

}  // namespace heddle
