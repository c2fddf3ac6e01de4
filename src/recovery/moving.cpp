#include "recovery/moving.hpp"

#include <fmt/format.h>

#include <set>

namespace heddle {

void check_movable(const ContextLayer& layer) {
  if (layer.options.expert_slices)
    throw InputError("a layer of expert slices cannot recover: no other rank has what a lost one held; take whole experts");
  if (layer.options.tensor_parallel && layer.options.way != Way::gather) {
    throw InputError(
        fmt::format("way {} under tensor-parallel attention cannot recover: a lost rank's slice of the batch would be "
                    "nobody's; take gather, or data-parallel attention",
                    name(layer.options.way)));
  }
}

int place_experts(std::vector<ContextLayer>& layers, const std::vector<ContextLayer>& original, const Rehome& rehome,
                  const std::vector<bool>& live, int first_rank, int ranks) {
  int moved = 0;
  for (std::size_t i = 0; i < original.size(); ++i) {
    const Placement before = layers[i].placement;
    layers[i].placement = rehome(original[i].placement, live);
    for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
      const std::set<int> held(before.experts_of(rank).begin(), before.experts_of(rank).end());
      for (const int expert : layers[i].placement.experts_of(rank)) moved += held.count(expert) == 0 ? 1 : 0;
    }
  }
  return moved;
}

Placement without_gaps(const Placement& placement, const std::vector<bool>& live) {
  std::vector<int> number(live.size(), -1);
  int count = 0;
  for (std::size_t rank = 0; rank < live.size(); ++rank) number[rank] = live[rank] ? count++ : -1;
  std::vector<int> rank_of;
  for (const int rank : placement.rank_map()) rank_of.push_back(number[static_cast<std::size_t>(rank)]);
  return Placement::from_map(std::move(rank_of), count);
}

}  // namespace heddle
