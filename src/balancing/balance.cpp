// Where copies of experts go, from loads alone.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "heddle/balancing.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

int groups_of(std::span<const double> loads, const BalanceOptions& options) {
  return options.groups.value_or(static_cast<int>(loads.size()));
}

void check(std::span<const double> loads, const BalanceOptions& o) {
  const auto experts = static_cast<std::int64_t>(loads.size());
  if (o.ranks < 1 || experts < 1 || o.extra < 0 || o.nodes < 1)
    throw InputError(fmt::format("{} experts and {} more copies on {} ranks of {} nodes", experts, o.extra, o.ranks, o.nodes));
  const auto bad = std::ranges::find_if(loads, [](double load) { return !(load >= 0.0); });
  if (bad != loads.end()) throw InputError(fmt::format("expert {} has a load of {}", bad - loads.begin(), *bad));
  if (experts + o.extra > experts * (o.ranks / o.nodes)) {
    throw InputError(fmt::format("{} experts and {} more copies on {} ranks{}: every rank can hold each expert once", experts,
                                 o.extra, o.ranks,
                                 o.nodes > 1 ? fmt::format(" of {} nodes, where copies stay on one", o.nodes) : ""));
  }
  if (o.nodes == 1) return;
  const int groups = groups_of(loads, o);
  if (groups < 1 || experts % groups != 0 || groups % o.nodes != 0 || o.ranks % o.nodes != 0 || o.extra % o.nodes != 0) {
    throw InputError(fmt::format(
        "{} experts in {} groups and {} more copies on {} ranks of {} nodes: groups are of one size, and every node has as "
        "many ranks, groups and copies; take 1 node to spread experts over all ranks",
        experts, groups, o.extra, o.ranks, o.nodes));
  }
}

/// Items by falling load, ties in their order.
std::vector<int> by_falling_load(std::span<const double> loads) {
  std::vector<int> order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return loads[index(a)] > loads[index(b)]; });
  return order;
}

/// Packs that fill up greedily: an item goes where least is, of packs with room.
class Packs {
 public:
  Packs(int count, int room) : loads_(index(count), 0.0), held_(index(count), 0), room_(room) {}

  /// The pack with least to do of those with room that do not hold the kind already; where all with room do, any with room.
  template <class Holds>
  int add(double load, Holds holds) {
    int best = -1, second = -1;
    for (int pack = 0; pack < static_cast<int>(loads_.size()); ++pack) {
      if (held_[index(pack)] == room_) continue;
      int& place = holds(pack) ? second : best;
      if (place < 0 || loads_[index(pack)] < loads_[index(place)]) place = pack;
    }
    const int pack = best >= 0 ? best : second;
    loads_[index(pack)] += load;
    ++held_[index(pack)];
    return pack;
  }

 private:
  std::vector<double> loads_;
  std::vector<int> held_;
  int room_;
};

/// Copies of each expert, `extra` more than experts, none of more than `most`.
std::vector<int> count_copies(std::span<const double> loads, int extra, int most) {
  std::vector<int> copies(loads.size(), 1);
  for (int i = 0; i < extra; ++i) {
    std::size_t chosen = loads.size();
    for (std::size_t expert = 0; expert < loads.size(); ++expert) {
      if (copies[expert] == most) continue;
      if (chosen == loads.size() || loads[expert] / copies[expert] > loads[chosen] / copies[chosen]) chosen = expert;
    }
    ++copies[chosen];
  }
  return copies;
}

/// Experts of each node.
std::vector<std::vector<int>> spread_groups(std::span<const double> loads, const BalanceOptions& options) {
  if (options.nodes == 1) {
    std::vector<int> all(loads.size());
    std::iota(all.begin(), all.end(), 0);
    return {all};
  }
  const int groups = groups_of(loads, options);
  const std::size_t size = loads.size() / index(groups);
  std::vector<double> group_loads(index(groups), 0.0);
  for (std::size_t expert = 0; expert < loads.size(); ++expert) group_loads[expert / size] += loads[expert];
  Packs nodes(options.nodes, groups / options.nodes);
  std::vector<std::vector<int>> experts(index(options.nodes));
  for (const int group : by_falling_load(group_loads)) {
    auto& node = experts[index(nodes.add(group_loads[index(group)], [](int) { return false; }))];
    for (std::size_t i = 0; i < size; ++i) node.push_back(static_cast<int>(index(group) * size + i));
  }
  for (auto& node : experts) std::ranges::sort(node);
  return experts;
}

/// Experts of each of a node's ranks.
std::vector<std::vector<int>> fill_ranks(std::span<const double> loads, std::span<const int> experts, int ranks, int extra) {
  std::vector<double> own;
  for (const int expert : experts) own.push_back(loads[index(expert)]);
  const std::vector<int> copies = count_copies(own, extra, ranks);
  std::vector<int> item_of;  // an item for each copy
  std::vector<double> item_loads;
  for (std::size_t i = 0; i < own.size(); ++i) {
    item_of.insert(item_of.end(), index(copies[i]), static_cast<int>(i));
    item_loads.insert(item_loads.end(), index(copies[i]), own[i] / copies[i]);
  }
  Packs packs(ranks, (static_cast<int>(item_of.size()) + ranks - 1) / ranks);
  std::vector<std::vector<int>> held(index(ranks));
  for (const int item : by_falling_load(item_loads)) {
    const int expert = experts[index(item_of[index(item)])];
    const int rank = packs.add(item_loads[index(item)],
                               [&](int pack) { return std::ranges::find(held[index(pack)], expert) != held[index(pack)].end(); });
    held[index(rank)].push_back(expert);
  }
  for (auto& rank : held) std::ranges::sort(rank);
  return held;
}

}  // namespace

ReplicaMap balance_experts(std::span<const double> loads, const BalanceOptions& options) {
  check(loads, options);
  std::vector<std::vector<int>> experts_of;
  for (const std::vector<int>& node : spread_groups(loads, options)) {
    for (auto& rank : fill_ranks(loads, node, options.ranks / options.nodes, options.extra / options.nodes))
      experts_of.push_back(std::move(rank));
  }
  return ReplicaMap::from_ranks(experts_of, static_cast<int>(loads.size()));
}

std::vector<double> rank_loads(std::span<const double> loads, const ReplicaMap& map) {
  std::vector<double> sums(index(map.ranks()), 0.0);
  for (int physical = 0; physical < map.physical(); ++physical) {
    const int expert = map.logical_of(physical);
    sums[index(map.placement().rank_of(physical))] += loads[index(expert)] / static_cast<double>(map.copies_of(expert).size());
  }
  return sums;
}

double max_over_mean(std::span<const double> values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return sum == 0.0 ? 0.0 : std::ranges::max(values) * static_cast<double>(values.size()) / sum;
}

}  // namespace heddle
