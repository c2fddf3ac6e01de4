// Which expert goes to which survivor.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "heddle/recovery.hpp"

namespace heddle {

namespace {

/// Moves the experts of ranks that are not live. `prefers(expert, rank)`: would the rank rather take it than others?
template <class Prefers>
Placement move_lost(const Placement& original, const std::vector<bool>& live, const Prefers& prefers) {
  if (original.is_everywhere()) throw InputError("slices of experts cannot move: no other rank has what a lost one held");
  if (std::find(live.begin(), live.end(), true) == live.end()) throw InputError("no rank is live that experts could move to");
  std::vector<int> rank_of(original.rank_map().begin(), original.rank_map().end());
  std::vector<int> held(live.size(), 0);
  for (const int rank : rank_of) held[static_cast<std::size_t>(rank)] += 1;
  for (int expert = 0; expert < original.experts(); ++expert) {
    int& rank = rank_of[static_cast<std::size_t>(expert)];
    if (live[static_cast<std::size_t>(rank)]) continue;
    std::optional<std::tuple<bool, int, int>> best;  // not preferred, experts held, rank
    for (int other = 0; other < original.ranks(); ++other) {
      const auto i = static_cast<std::size_t>(other);
      if (!live[i]) continue;
      const std::tuple<bool, int, int> this_one{!prefers(expert, other), held[i], other};
      if (!best || this_one < *best) best = this_one;
    }
    rank = std::get<2>(*best);
    held[static_cast<std::size_t>(rank)] += 1;
  }
  return Placement::from_map(std::move(rank_of), original.ranks());
}

}  // namespace

Placement spread_over_survivors(const Placement& original, const std::vector<bool>& live) {
  return move_lost(original, live, [](int, int) { return false; });
}

Rehome beside_copies(std::vector<int> logical_of) {
  return [logical_of = std::move(logical_of)](const Placement& original, const std::vector<bool>& live) {
    if (static_cast<int>(logical_of.size()) != original.experts()) {
      throw InputError(fmt::format("beside_copies knows of {} experts what they are copies of, the placement has {}",
                                   logical_of.size(), original.experts()));
    }
    return move_lost(original, live, [&](int expert, int rank) {
      const auto of_rank = original.experts_of(rank);
      return std::any_of(of_rank.begin(), of_rank.end(), [&](int held) {
        return logical_of[static_cast<std::size_t>(held)] == logical_of[static_cast<std::size_t>(expert)];
      });
    });
  };
}

}  // namespace heddle
