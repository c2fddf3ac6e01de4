// The plan's section on several nodes: direct against hybrid.
#include <fmt/format.h>

#include "heddle/node_plan.hpp"
#include "plan/sections.hpp"
#include "plan/ways.hpp"

namespace heddle::plan {

namespace {

void add_copies(Section& section, const PlanRequest& request) {
  const Adder copies(section, Unit::copies);
  const LayerShape& shape = request.shape;
  const GroupLimit& limit = request.group_limit;
  const std::string routed =
      limit.chosen == limit.groups ? "" : fmt::format(", the router takes {} of {} groups", limit.chosen, limit.groups);
  copies("needed_ranks", "ranks that a token needs", expected_copies(shape.experts, shape.topk, request.ranks, limit),
         fmt::format("of {} ranks{}", request.ranks, routed), exchange_article("1.3"));
  copies("needed_nodes", "nodes that a token needs", expected_copies(shape.experts, shape.topk, request.nodes, limit),
         fmt::format("of {} nodes{}", request.nodes, routed), "the same with nodes as parts");
}

void add_level(Section& section, std::string_view mode, std::string_view half, const NodeTraffic& traffic) {
  const Adder bytes(section, Unit::bytes);
  const auto add = [&](std::string_view level, const LevelTraffic& there) {
    bytes(fmt::format("{}.{}_{}", mode, half, level), fmt::format("{}, {}, {}", mode, half, level), there.bytes,
          fmt::format("{:.1f} rows, {:.3f} a token", there.rows, there.copies), "docs/planning.md");
  };
  add("inside", traffic.inside);
  add("between", traffic.between);
}

void add_times(Section& section, std::string_view mode, const NodeTimes& times) {
  const Adder seconds(section, Unit::seconds);
  const auto add = [&](std::string_view part, double time, std::string_view formula) {
    seconds(fmt::format("{}.{}", mode, part), fmt::format("{}, {}", mode, part), time, std::string(formula), "docs/planning.md");
  };
  add("dispatch", times.dispatch, "latency, the slower level, laying out");
  add("experts", times.experts, "weights, or both GEMMs and the activation");
  add("combine", times.combine, "latency, the slower level, sums");
  add("layer", times.total(), "their sum");
}

}  // namespace

Section nodes_section(const PlanRequest& request) {
  Section section{"nodes",
                  fmt::format("elastic on {} nodes of {} ranks: bytes that leave a rank, and a model of its time", request.nodes,
                              request.ranks / request.nodes),
                  {}};
  if (request.nodes == 1) return section;
  add_copies(section, request);
  for (const auto& [mode, name] : {std::pair{NodeMode::direct, "direct"}, std::pair{NodeMode::hybrid, "hybrid"}}) {
    add_level(section, name, "dispatch", node_dispatch_traffic(Way::elastic, mode, request));
    add_level(section, name, "combine", node_combine_traffic(Way::elastic, mode, NodeSums::rank, request));
    if (const auto times = estimate_node_time(Way::elastic, mode, NodeSums::rank, request)) add_times(section, name, *times);
    Adder(section, Unit::bytes)(fmt::format("{}.buffer", name), fmt::format("{}, buffer of a rank", name),
                                double(node_buffer(mode, NodeSums::rank, request)),
                                "its part of the heap, and messages on their way", "this library");
  }
  return section;
}

}  // namespace heddle::plan
