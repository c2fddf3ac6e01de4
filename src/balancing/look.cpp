#include "balancing/look.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "heddle/error.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

double imbalance_of(const ReplicaMap& map, CopyRule rule, std::span<const std::int64_t> counts) {
  std::vector<int> rows;
  for (const std::int64_t count : counts)
    rows.push_back(static_cast<int>(std::min<std::int64_t>(count, std::numeric_limits<int>::max() / map.experts())));
  const std::vector<int> shares = share_rows(map, rule, 0, rows);
  std::vector<double> sums(index(map.ranks()), 0.0);
  for (int copy = 0; copy < map.physical(); ++copy) sums[index(map.placement().rank_of(copy))] += shares[index(copy)];
  return max_over_mean(sums);
}

}  // namespace

Look look_at(const ReplicaMap& map, const BalancingOptions& options, std::span<const std::int64_t> counts) {
  const std::vector<double> loads(counts.begin(), counts.end());
  const BalanceOptions wanted{map.ranks(), map.physical() - map.experts(), options.nodes, options.groups};
  Look look{settle(balance_experts(loads, wanted), map, options.nodes)};
  look.imbalance = imbalance_of(map, options.rule, counts);
  look.expected = imbalance_of(look.wanted, options.rule, counts);
  return look;
}

void check_balancing(const LayerShape& shape, const ReplicaMap& map, const LayerOptions& layer, const BalancingOptions& options,
                     int group_nodes) {
  // Counts, words and weights go through memory that all ranks see.
  if (group_nodes > 1) {
    throw InputError(fmt::format("a layer that changes places knows one node, the group has {}; take a layer whose placement stays",
                                 group_nodes));
  }
  if (layer.expert_slices)
    throw InputError("slices of experts are on every rank: there is nothing to balance; leave expert_slices");
  if (map.experts() != shape.experts)
    throw InputError(fmt::format("a placement of {} experts for a layer of {}", map.experts(), shape.experts));
  if (!map.is_even()) {
    throw InputError(
        fmt::format("a placement of {} copies on {} ranks of up to {} each; a layer that changes places needs as many on "
                    "every rank",
                    map.physical(), map.ranks(), map.placement().max_local_experts()));
  }
  if (options.every && *options.every < 1) throw InputError(fmt::format("a look at the loads every {} calls", *options.every));
  if (options.nodes < 1 || map.ranks() % options.nodes != 0)
    throw InputError(fmt::format("{} ranks of {} nodes: every node has as many", map.ranks(), options.nodes));
  if (options.copy_bytes == 0) throw InputError("copies of 0 bytes a call never end");
}

std::string describe_balancing(const ReplicaMap& map, const BalancingOptions& o) {
  std::string text = fmt::format("copy rule={}\nnodes={}\ngroups={}\nlooks every={}\nworth={}\n", static_cast<int>(o.rule), o.nodes,
                                 o.groups.value_or(map.experts()), o.every.value_or(0), o.worth);
  for (int rank = 0; rank < map.ranks(); ++rank)
    text += fmt::format("experts of rank {}={}\n", rank, fmt::join(map.experts_of(rank), ","));
  return text;
}

}  // namespace heddle
