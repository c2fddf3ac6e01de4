// A wanted placement laid over the one in force, so that few weights have to move.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "heddle/balancing.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// Copies that two ranks have in common. Both lists may hold an expert more than once.
int common(std::span<const int> a, std::span<const int> b) {
  std::vector<int> x(a.begin(), a.end()), y(b.begin(), b.end()), both;
  std::ranges::sort(x);
  std::ranges::sort(y);
  std::ranges::set_intersection(x, y, std::back_inserter(both));
  return static_cast<int>(both.size());
}

/// For each of `count` places which of as many wanted things comes there: pairs with most in common first.
template <class Common>
std::vector<int> name_by(int count, Common common_of) {
  struct Pair {
    int common, now, then;
  };
  std::vector<Pair> pairs;
  for (int now = 0; now < count; ++now) {
    for (int then = 0; then < count; ++then) pairs.push_back({common_of(now, then), now, then});
  }
  std::ranges::stable_sort(pairs, [](const Pair& a, const Pair& b) { return a.common > b.common; });
  std::vector<int> becomes(index(count), -1);
  std::vector<bool> taken(index(count), false);
  for (const Pair& pair : pairs) {
    if (becomes[index(pair.now)] >= 0 || taken[index(pair.then)]) continue;
    becomes[index(pair.now)] = pair.then;
    taken[index(pair.then)] = true;
  }
  return becomes;
}

/// Experts of `count` ranks from `first` on.
std::vector<int> experts_of_ranks(const ReplicaMap& map, int first, int count) {
  std::vector<int> experts;
  for (int rank = first; rank < first + count; ++rank) {
    const auto own = map.experts_of(rank);
    experts.insert(experts.end(), own.begin(), own.end());
  }
  return experts;
}

/// `then` in an order in which what stays is where it was in `now`.
std::vector<int> keep_places(std::span<const int> then, std::span<const int> now) {
  std::vector<int> left(then.begin(), then.end()), placed(now.size(), -1);
  for (std::size_t place = 0; place < now.size(); ++place) {
    const auto stays = std::ranges::find(left, now[place]);
    if (stays == left.end()) continue;
    placed[place] = *stays;
    left.erase(stays);
  }
  auto next = left.begin();
  for (int& expert : placed) {
    if (expert < 0) expert = *next++;
  }
  return placed;
}

/// The wanted ranks that the ranks become, if what they have in common decides; nodes first.
std::vector<int> names_of_ranks(const ReplicaMap& wanted, const ReplicaMap& current, int nodes) {
  const int ranks = wanted.ranks() / nodes;
  const std::vector<int> node_then = name_by(nodes, [&](int now, int then) {
    return common(experts_of_ranks(current, now * ranks, ranks), experts_of_ranks(wanted, then * ranks, ranks));
  });
  std::vector<int> becomes;
  for (int node = 0; node < nodes; ++node) {
    const int now_first = node * ranks, then_first = node_then[index(node)] * ranks;
    for (const int then : name_by(ranks, [&](int now, int other) {
           return common(current.experts_of(now_first + now), wanted.experts_of(then_first + other));
         }))
      becomes.push_back(then_first + then);
  }
  return becomes;
}

ReplicaMap laid_over(const ReplicaMap& wanted, const ReplicaMap& current, std::span<const int> becomes) {
  std::vector<std::vector<int>> experts_of;
  for (int rank = 0; rank < current.ranks(); ++rank)
    experts_of.push_back(keep_places(wanted.experts_of(becomes[index(rank)]), current.experts_of(rank)));
  return ReplicaMap::from_ranks(experts_of, wanted.experts());
}

int count_moves(const ReplicaMap& from, const ReplicaMap& to) {
  int moves = 0;
  for (int copy = 0; copy < from.physical(); ++copy) moves += from.logical_of(copy) != to.logical_of(copy) ? 1 : 0;
  return moves;
}

}  // namespace

ReplicaMap settle(const ReplicaMap& wanted, const ReplicaMap& current, int nodes) {
  if (!wanted.is_even() || !current.is_even() || wanted.ranks() != current.ranks() || wanted.physical() != current.physical() ||
      wanted.experts() != current.experts() || nodes < 1 || wanted.ranks() % nodes != 0) {
    throw InputError(fmt::format(
        "a placement of {} copies of {} experts on {} ranks cannot follow one of {} copies of {} on {} ({} nodes): both are even "
        "and of the same sizes",
        wanted.physical(), wanted.experts(), wanted.ranks(), current.physical(), current.experts(), current.ranks(), nodes));
  }
  std::vector<int> same(index(wanted.ranks()));
  std::iota(same.begin(), same.end(), 0);
  const ReplicaMap renamed = laid_over(wanted, current, names_of_ranks(wanted, current, nodes)),
                   kept = laid_over(wanted, current, same);
  return count_moves(current, kept) <= count_moves(current, renamed) ? kept : renamed;
}

}  // namespace heddle
