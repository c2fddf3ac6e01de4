#include "replay/placed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "heddle/error.hpp"

namespace heddle::replay {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// Copies of each expert, all together experts + replicas.
std::vector<int> count_copies(std::span<const double> loads, int ranks, int replicas) {
  std::vector<int> copies(loads.size(), 1);
  for (int i = 0; i < replicas; ++i) {
    std::size_t chosen = loads.size();
    for (std::size_t expert = 0; expert < loads.size(); ++expert) {
      if (copies[expert] == ranks) continue;
      if (chosen == loads.size() || loads[expert] / copies[expert] > loads[chosen] / copies[chosen]) chosen = expert;
    }
    ++copies[chosen];
  }
  return copies;
}

/// The rank with least to do of those with room that lack the expert; where all with room have it, any with room.
int least_loaded(const std::vector<double>& loads, const std::vector<int>& held, int room, const std::vector<int>& has) {
  int best = -1, second = -1;
  for (int rank = 0; rank < static_cast<int>(loads.size()); ++rank) {
    if (held[index(rank)] == room) continue;
    int& place = std::ranges::find(has, rank) == has.end() ? best : second;
    if (place < 0 || loads[index(rank)] < loads[index(place)]) place = rank;
  }
  return best >= 0 ? best : second;
}

}  // namespace

Placed::Placed(const Placement& placement) : ranks_(placement.ranks()) {
  for (int expert = 0; expert < placement.experts(); ++expert) ranks_of_.push_back({placement.rank_of(expert)});
}

Placed::Placed(std::vector<std::vector<int>> ranks_of, int ranks) : ranks_of_(std::move(ranks_of)), ranks_(ranks) {}

Placed place_greedily(std::span<const double> loads, int ranks, int replicas) {
  const auto experts = static_cast<std::int64_t>(loads.size());
  if (ranks < 1 || experts < 1 || replicas < 0 || experts + replicas > experts * ranks) {
    throw InputError(
        fmt::format("{} experts and {} replicas on {} ranks: every rank can hold each expert once", experts, replicas, ranks));
  }
  const auto bad = std::ranges::find_if(loads, [](double load) { return !(load >= 0.0); });
  if (bad != loads.end()) throw InputError(fmt::format("expert {} has a load of {}", bad - loads.begin(), *bad));

  const std::vector<int> copies = count_copies(loads, ranks, replicas);
  std::vector<int> order;  // an expert for each of its copies
  for (std::size_t expert = 0; expert < loads.size(); ++expert)
    order.insert(order.end(), index(copies[expert]), static_cast<int>(expert));
  const auto load_of_copy = [&](int expert) { return loads[index(expert)] / copies[index(expert)]; };
  std::ranges::stable_sort(order, [&](int a, int b) { return load_of_copy(a) > load_of_copy(b); });

  const int room = static_cast<int>((experts + replicas + ranks - 1) / ranks);
  std::vector<double> load_of_rank(index(ranks), 0.0);
  std::vector<int> held(index(ranks), 0);
  std::vector<std::vector<int>> ranks_of(loads.size());
  for (const int expert : order) {
    const int rank = least_loaded(load_of_rank, held, room, ranks_of[index(expert)]);
    ranks_of[index(expert)].push_back(rank);
    load_of_rank[index(rank)] += load_of_copy(expert);
    ++held[index(rank)];
  }
  return Placed(std::move(ranks_of), ranks);
}

}  // namespace heddle::replay
