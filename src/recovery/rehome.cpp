// Which expert goes to which survivor.
#include <algorithm>

#include "heddle/recovery.hpp"

namespace heddle {

Placement spread_over_survivors(const Placement& original, const std::vector<bool>& live) {
  if (original.is_everywhere()) throw InputError("slices of experts cannot move: no other rank has what a lost one held");
  if (std::find(live.begin(), live.end(), true) == live.end()) throw InputError("no rank is live that experts could move to");
  std::vector<int> rank_of(original.rank_map().begin(), original.rank_map().end());
  std::vector<int> held(live.size(), 0);
  for (const int rank : rank_of) held[static_cast<std::size_t>(rank)] += 1;
  for (int& rank : rank_of) {
    if (live[static_cast<std::size_t>(rank)]) continue;
    int best = -1;
    for (int other = 0; other < original.ranks(); ++other) {
      const auto i = static_cast<std::size_t>(other);
      if (live[i] && (best < 0 || held[i] < held[static_cast<std::size_t>(best)])) best = other;
    }
    rank = best;
    held[static_cast<std::size_t>(best)] += 1;
  }
  return Placement::from_map(std::move(rank_of), original.ranks());
}

}  // namespace heddle
