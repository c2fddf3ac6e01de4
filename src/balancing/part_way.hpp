// Changes of placement in several steps, where there is memory for a few experts on their way to a rank.
#pragma once

#include "heddle/balancing.hpp"

namespace heddle {

/// A placement on the way from `current` to `wanted` (even ones of the same sizes): at most `most` places of a rank are changed, to
/// what `wanted` has there, and every expert has a copy. `wanted` where it changes no more than that; `current` where no place can
/// be changed so. The same everywhere.
ReplicaMap part_way(const ReplicaMap& current, const ReplicaMap& wanted, int most);

}  // namespace heddle
