// The planner beyond one node: copies, bytes a level, buffers and times of a layer whose ranks are shared equally by several
// nodes, direct against hybrid (docs/planning.md, docs/nodes.md). A level is inside of a node, or between nodes. Units, rates and
// assumptions are those of plan.hpp; the experts of a node are neighbours.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heddle/exchange.hpp"
#include "heddle/plan.hpp"

namespace heddle {

/// Where the results of a token are added up on their way home. `node` is what a network library with sums in its forwarding does,
/// for comparison: this library has no such order, because it would change the bits of `rank`.
enum class NodeSums : std::uint8_t { rank, home, node };

/// Parts (ranks, or nodes) that hold at least one of a token's k experts, on average, under a router with groups. Throws
/// InputError where groups and parts do not divide each other or the experts.
double expected_copies(int experts, int topk, int parts, const GroupLimit& limit);

/// Rows of one direction that leave one rank, by where they go; on average as many arrive. Their sum is not the copies of a token:
/// in hybrid mode a row may move at both levels.
struct LevelTraffic {
  double copies = 0;  ///< of one of the rank's tokens
  double rows = 0;
  double bytes = 0;
};
struct NodeTraffic {
  LevelTraffic own;      ///< to the rank itself
  LevelTraffic inside;   ///< to other ranks of its node
  LevelTraffic between;  ///< to other nodes
};

/// Elastic or normal (one copy a rank, or a node), low_latency (one a choice, direct only). Throws InputError for other ways.
NodeTraffic node_dispatch_traffic(Way way, NodeMode mode, const PlanRequest& request);
NodeTraffic node_combine_traffic(Way way, NodeMode mode, NodeSums sums, const PlanRequest& request);

/// A layer's three parts in seconds.
struct NodeTimes {
  double dispatch = 0;
  double experts = 0;  ///< 0 where the machine has no rate for them
  double combine = 0;
  double total() const { return dispatch + experts + combine; }
};

/// nullopt if the machine has no link, or no network and several nodes are asked for. Both levels move at the same time, so the
/// slower one counts; passes over rows that have arrived come behind. Without a MachineFit it is what the bytes alone take.
std::optional<NodeTimes> estimate_node_time(Way way, NodeMode mode, NodeSums sums, const PlanRequest& request);

/// Bytes of a rank for elastic over nodes as this library lays it out: its part of the heap, and messages on their way.
std::uint64_t node_buffer(NodeMode mode, NodeSums sums, const PlanRequest& request);

/// The request on every number of ranks from one node's to `most` that is `ranks_a_node` times a power of two.
std::vector<PlanRequest> scale_out(const PlanRequest& request, int ranks_a_node, int most);

/// A published time of somebody else's library, and what the model says for the same call.
struct PublishedTime {
  std::string what;
  std::string stated;  ///< as published
  double seconds = 0;  ///< which that is
  double model = 0;
  bool fitted = false;  ///< the machine's fit was made from it
};
std::vector<PublishedTime> published_times();

}  // namespace heddle
