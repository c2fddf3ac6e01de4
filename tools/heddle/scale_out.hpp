// heddle plan on several nodes: what was typed, and the table of --up-to.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "heddle/node_plan.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace heddle::tool {

struct NodeOptions {
  std::optional<int> nodes, ranks_a_node, up_to;
  GroupLimit limit;
};

/// Adds --nodes, --gpus-per-node, the router's groups and --up-to, which it returns.
CLI::Option* add_node_options(CLI::App& plan, NodeOptions& options);

/// Throws InputError where they were left out.
int ranks_a_node(const NodeOptions& options);

/// The request's nodes and the router's groups. Throws InputError with the numbers where the ranks are not whole nodes.
void take_nodes(const NodeOptions& options, PlanRequest& request);

/// One number of ranks: times are empty where the machine has no network.
struct ScaleStep {
  PlanRequest request;
  double needed_ranks = 0, needed_nodes = 0;
  struct Mode {
    double between = 0;  ///< bytes that leave a rank for other nodes, both directions
    std::optional<NodeTimes> times;
    std::uint64_t buffer = 0;
  };
  Mode direct, hybrid;
};

std::vector<ScaleStep> scale_out_steps(const NodeOptions& options, const PlanRequest& request);
void print_scale_out(const PlanRequest& request, const std::vector<ScaleStep>& steps);
nlohmann::ordered_json scale_out_json(const std::vector<ScaleStep>& steps);

}  // namespace heddle::tool
