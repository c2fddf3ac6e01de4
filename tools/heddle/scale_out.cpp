#include "scale_out.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

ScaleStep::Mode mode_of(NodeMode mode, const PlanRequest& request) {
  return {node_dispatch_traffic(Way::elastic, mode, request).between.bytes +
              node_combine_traffic(Way::elastic, mode, NodeSums::rank, request).between.bytes,
          estimate_node_time(Way::elastic, mode, NodeSums::rank, request), node_buffer(mode, NodeSums::rank, request)};
}

std::string microseconds(double seconds) { return fmt::format("{:.1f}", seconds * 1e6); }

std::string mode_cells(const ScaleStep::Mode& mode) {
  const double mebi = 1024.0 * 1024;
  const auto time = [&](double NodeTimes::*part) { return mode.times ? microseconds((*mode.times).*part) : std::string("-"); };
  const std::string total = mode.times ? microseconds(mode.times->total()) : "-";
  return fmt::format("{:>10.2f} {:>9} {:>9} {:>9} {:>9} {:>9.1f}", mode.between / mebi, time(&NodeTimes::dispatch),
                     time(&NodeTimes::experts), time(&NodeTimes::combine), total, double(mode.buffer) / mebi);
}

nlohmann::ordered_json mode_json(const ScaleStep::Mode& mode) {
  nlohmann::ordered_json json{{"between_bytes", mode.between}, {"buffer_bytes", mode.buffer}};
  if (mode.times) {
    json["dispatch_seconds"] = mode.times->dispatch;
    json["experts_seconds"] = mode.times->experts;
    json["combine_seconds"] = mode.times->combine;
  }
  return json;
}

}  // namespace

CLI::Option* add_node_options(CLI::App& plan, NodeOptions& options) {
  const auto number = [&plan](const char* name, auto& value, const char* help) {
    return plan.add_option(name, value, help)->type_name("N")->check(whole_number);
  };
  CLI::Option* nodes = number("--nodes", options.nodes, "nodes that share the ranks equally (default: 1)");
  CLI::Option* inside = number("--gpus-per-node", options.ranks_a_node, "the same by the ranks of a node")->excludes(nodes);
  number("--router-groups", options.limit.groups, "groups of experts that the router chooses among, for what crosses nodes");
  number("--router-topk-groups", options.limit.chosen, "how many of them a token's experts come from");
  return number("--up-to", options.up_to, "a table of nodes of --gpus-per-node: 1, 2, 4 .. up to so many ranks, instead of a plan")
      ->needs(inside);
}

int ranks_a_node(const NodeOptions& options) {
  if (!options.ranks_a_node) throw InputError("--up-to needs --gpus-per-node N, the ranks of a node");
  return *options.ranks_a_node;
}

void take_nodes(const NodeOptions& options, PlanRequest& request) {
  request.group_limit = options.limit;
  if (options.nodes) request.nodes = *options.nodes;
  if (!options.ranks_a_node) return;
  const int inside = *options.ranks_a_node;
  if (inside < 1 || request.ranks % inside != 0)
    throw InputError(fmt::format("{} ranks are no whole number of nodes of {}", request.ranks, inside));
  request.nodes = request.ranks / inside;
}

std::vector<ScaleStep> scale_out_steps(const NodeOptions& options, const PlanRequest& request) {
  check_request(request);
  std::vector<ScaleStep> steps;
  for (const PlanRequest& one : scale_out(request, ranks_a_node(options), *options.up_to)) {
    check_request(one);
    const auto copies = [&](int parts) { return expected_copies(one.shape.experts, one.shape.topk, parts, one.group_limit); };
    steps.push_back({one, copies(one.ranks), copies(one.nodes), mode_of(NodeMode::direct, one), mode_of(NodeMode::hybrid, one)});
  }
  return steps;
}

void print_scale_out(const PlanRequest& request, const std::vector<ScaleStep>& steps) {
  fmt::print("elastic on nodes of {} ranks, {} tokens a rank, machine {}: a model, see docs/planning.md\n", request.ranks,
             request.tokens, request.machine.name);
  fmt::print(
      "MB to other nodes that leave a rank in a round trip; dispatch, experts, combine and their sum in us; MB of buffer\n\n");
  const std::string columns =
      fmt::format("{:>10} {:>9} {:>9} {:>9} {:>9} {:>9}", "to nodes", "dispatch", "experts", "combine", "layer", "buffer");
  fmt::print("{:>6} {:>6} {:>7} {:>7} | {:<60} | hybrid\n", "", "", "needed", "needed", "direct");
  fmt::print("{:>6} {:>6} {:>7} {:>7} | {} | {}\n", "ranks", "nodes", "ranks", "nodes", columns, columns);
  for (const ScaleStep& step : steps) {
    fmt::print("{:>6} {:>6} {:>7.2f} {:>7.2f} | {} | {}\n", step.request.ranks, step.request.nodes, step.needed_ranks,
               step.needed_nodes, mode_cells(step.direct), mode_cells(step.hybrid));
  }
}

nlohmann::ordered_json scale_out_json(const std::vector<ScaleStep>& steps) {
  auto json = nlohmann::ordered_json::array();
  for (const ScaleStep& step : steps) {
    json.push_back({{"ranks", step.request.ranks},
                    {"nodes", step.request.nodes},
                    {"needed_ranks", step.needed_ranks},
                    {"needed_nodes", step.needed_nodes},
                    {"direct", mode_json(step.direct)},
                    {"hybrid", mode_json(step.hybrid)}});
  }
  return json;
}

}  // namespace heddle::tool
