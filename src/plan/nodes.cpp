// What crosses nodes and what stays inside: copies, rows and bytes a level, and the buffer of a rank.
#include <fmt/format.h>

#include "exchange/host_exchange.hpp"
#include "exchange/nodes/layout.hpp"
#include "heddle/error.hpp"
#include "heddle/node_plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

namespace {

/// C(of - out, draws) / C(of, draws): none of `out` things is among the drawn ones.
double none_drawn(int out, int of, int draws) {
  double chance = 1;
  for (int i = 0; i < draws; ++i) chance *= std::max(0.0, static_cast<double>(of - out - i)) / static_cast<double>(of - i);
  return chance;
}

/// C(inside, hits) C(of - inside, draws - hits) / C(of, draws).
double exactly_drawn(int inside, int of, int draws, int hits) {
  double chance = none_drawn(inside, of, draws - hits);  // the first draws miss,
  for (int i = 0; i < hits; ++i) {                       // the others hit, in any order
    chance *= static_cast<double>(inside - i) / (of - draws + hits - i);
    chance *= static_cast<double>(draws - i) / (i + 1);
  }
  return chance;
}

void check_limit(int experts, int topk, int parts, const GroupLimit& limit) {
  const int groups = limit.groups, chosen = limit.chosen;
  const bool fits = groups >= 1 && chosen >= 1 && chosen <= groups && experts % groups == 0 && experts % parts == 0 &&
                    (groups % parts == 0 || parts % groups == 0) && topk <= chosen * (experts / groups);
  if (!fits) {
    throw InputError(fmt::format(
        "a router that takes {} of {} groups does not fit {} experts, top-{}, on {} parts: groups and parts have to divide the "
        "experts and each other, and the groups taken have to hold top-k experts",
        chosen, groups, experts, topk, parts));
  }
}

int ranks_a_node(const PlanRequest& request) {
  if (request.nodes < 1 || request.ranks % request.nodes != 0) {
    throw InputError(fmt::format("{} ranks cannot be shared equally by {} nodes; take a number of nodes that divides the ranks",
                                 request.ranks, request.nodes));
  }
  return request.ranks / request.nodes;
}

/// Copies of a token at ranks, and at nodes.
struct Copies {
  double ranks = 0;
  double nodes = 0;
};

Copies copies_of(Way way, const PlanRequest& request) {
  const LayerShape& shape = request.shape;
  const auto parts = [&](int n) { return expected_copies(shape.experts, shape.topk, n, request.group_limit); };
  if (plan::traits(way).copies == plan::Copies::needed_ranks) return {parts(request.ranks), parts(request.nodes)};
  throw InputError(
      fmt::format("way {} is not planned over nodes in this mode; take elastic, normal or, direct, low_latency", name(way)));
}

class Split {
 public:
  explicit Split(const PlanRequest& request, Wire wire)
      : tokens_(request.tokens), row_(static_cast<double>(wire_row_bytes(wire, request.shape.hidden, request.quantisation))) {}
  LevelTraffic level(double copies) const { return {copies, tokens_ * copies, tokens_ * copies * row_}; }
  /// `near` copies inside of a node, shared evenly by its ranks, and `far` copies at other nodes.
  NodeTraffic traffic(double near, double far, int ranks_a_node) const {
    return {level(near / ranks_a_node), level(near * (1 - 1.0 / ranks_a_node)), level(far)};
  }

 private:
  double tokens_, row_;
};

bool is_low_latency(Way way, NodeMode mode) { return way == Way::low_latency && mode == NodeMode::direct; }

}  // namespace

double expected_copies(int experts, int topk, int parts, const GroupLimit& limit) {
  if (limit.chosen == limit.groups) return expected_copies(experts, topk, parts);
  check_limit(experts, topk, parts, limit);
  const int in_group = experts / limit.groups, pool = limit.chosen * in_group;
  if (parts >= limit.groups) {
    const double taken = static_cast<double>(limit.chosen) / limit.groups;
    return parts * taken * (1 - none_drawn(experts / parts, pool, topk));
  }
  const int own = limit.groups / parts;  // groups of a part
  double needed = 0;
  for (int hits = 1; hits <= std::min(own, limit.chosen); ++hits) {
    if (limit.chosen - hits > limit.groups - own) continue;
    needed += exactly_drawn(own, limit.groups, limit.chosen, hits) * (1 - none_drawn(hits * in_group, pool, topk));
  }
  return parts * needed;
}

// With ranks and routers alike a copy is as likely for one rank as for another: of those to all ranks one in `nodes` stays.
NodeTraffic node_dispatch_traffic(Way way, NodeMode mode, const PlanRequest& request) {
  const int inside = ranks_a_node(request);
  const double stay = 1.0 / request.nodes;
  const Split split(request, request.wire);
  if (is_low_latency(way, mode)) {
    const double k = request.shape.topk;
    return split.traffic(k * stay, k * (1 - stay), inside);
  }
  const Copies copies = copies_of(way, request);
  if (mode == NodeMode::direct) return split.traffic(copies.ranks * stay, copies.ranks * (1 - stay), inside);
  return split.traffic(copies.ranks, copies.nodes * (1 - stay), inside);
}

NodeTraffic node_combine_traffic(Way way, NodeMode mode, NodeSums sums, const PlanRequest& request) {
  const int inside = ranks_a_node(request);
  const double stay = 1.0 / request.nodes;
  const Split split(request, request.combine_wire);
  const bool by_choice = sums == NodeSums::home || is_low_latency(way, mode);
  const Copies copies = by_choice ? Copies{double(request.shape.topk), double(request.shape.topk)} : copies_of(way, request);
  // A row a choice goes straight home in either mode: no fewer would cross by way of another rank.
  if (mode == NodeMode::direct || by_choice) return split.traffic(copies.ranks * stay, copies.ranks * (1 - stay), inside);
  const double far = sums == NodeSums::node ? copies.nodes : copies.ranks;
  return split.traffic(copies.ranks, far * (1 - stay), inside);
}

std::uint64_t node_buffer(NodeMode mode, NodeSums sums, const PlanRequest& request) {
  ranks_a_node(request);
  ExchangeOptions options;
  options.way = Way::elastic;
  options.hidden = request.shape.hidden;
  options.topk = request.shape.topk;
  options.cap = request.cap;
  options.placement = Placement::contiguous(request.shape.experts, request.ranks);
  options.wire = request.wire;
  options.combine_wire = request.combine_wire;
  options.quantisation = request.quantisation;
  options.arrived = default_layout(options.way);
  options.reduce = sums == NodeSums::home ? Reduce::home : Reduce::rank;
  NodesLayout layout{make_layout<ElasticLayout>(options, {}), request.nodes, mode};
  layout.elastic.reduce = options.reduce;
  return exchange_memory(options).heap_bytes(request.ranks) + layout.message_bytes();
}

std::vector<PlanRequest> scale_out(const PlanRequest& request, int ranks_a_node, int most) {
  if (ranks_a_node < 1 || most < ranks_a_node)
    throw InputError(fmt::format("up to {} ranks in nodes of {}: at least one node is wanted", most, ranks_a_node));
  std::vector<PlanRequest> steps;
  for (int nodes = 1; nodes <= most / ranks_a_node; nodes *= 2) {
    steps.push_back(request);
    steps.back().ranks = nodes * ranks_a_node;
    steps.back().nodes = nodes;
  }
  return steps;
}

}  // namespace heddle
