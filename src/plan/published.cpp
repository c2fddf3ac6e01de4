// Times that DeepEP publishes, beside the model's for the same calls (https://github.com/deepseek-ai/DeepEP: README.md and
// docs/legacy.md). Bandwidths there count the rows that stay on a node, so a time is those bytes over the bandwidth.
#include <fmt/format.h>

#include "heddle/node_plan.hpp"

namespace heddle {

namespace {

/// DeepSeek-V3's layer on so many ranks in nodes of 8; fp8 rows with an f32 scale for 128 values out, bf16 back.
PlanRequest request_of(std::string_view machine, int ranks, int tokens) {
  PlanRequest request;
  request.shape = find_preset("deepseek-v3").shape;
  request.weights = WeightKind::fp8_block;
  request.ranks = ranks;
  request.nodes = ranks / 8;
  request.tokens = request.cap = tokens;
  request.wire = Wire::fp8;
  request.quantisation = {128, ScaleFormat::f32};
  request.machine = find_machine(machine);
  return request;
}

void add_low_latency(std::vector<PublishedTime>& all) {
  struct Row {
    int ranks;
    double dispatch, combine;
  };
  for (const Row& row :
       {Row{8, 77, 114}, Row{16, 118, 195}, Row{32, 155, 273}, Row{64, 173, 314}, Row{128, 192, 369}, Row{256, 194, 360}}) {
    const auto times = estimate_node_time(Way::low_latency, NodeMode::direct, NodeSums::home, request_of("h800", row.ranks, 128));
    const std::string call = fmt::format("low-latency, {} H800, 128 tokens, ", row.ranks);
    all.push_back({call + "dispatch", fmt::format("{} us", row.dispatch), row.dispatch * 1e-6, times->dispatch, row.ranks <= 16});
    all.push_back({call + "combine", fmt::format("{} us", row.combine), row.combine * 1e-6, times->combine, row.ranks == 8});
  }
}

/// Bandwidths in GB/s; on one node they count what arrives over NVLink, on several what goes to nodes.
struct Bandwidths {
  std::string_view library, machine;
  Way way;
  int ranks, tokens;
  double dispatch, combine;
  bool limited;  ///< the router takes 4 groups, a group a node
  bool fitted;
};

void add_bandwidths(std::vector<PublishedTime>& all, const Bandwidths& row) {
  PlanRequest request = request_of(row.machine, row.ranks, row.tokens);
  if (row.limited && request.nodes > 4) request.group_limit = {request.nodes, 4};
  const int parts = request.nodes == 1 ? row.ranks : request.nodes;
  const double rows = row.tokens * expected_copies(request.shape.experts, request.shape.topk, parts, request.group_limit);
  const auto times = estimate_node_time(row.way, NodeMode::hybrid, NodeSums::node, request);
  const auto add = [&](std::string_view half, double rate, Wire wire, double model) {
    const auto bytes = static_cast<double>(wire_row_bytes(wire, request.shape.hidden, request.quantisation));
    all.push_back({fmt::format("{}, {} {}, {} tokens, {}", row.library, row.ranks, request.machine.name, row.tokens, half),
                   fmt::format("{} GB/s", rate), rows * bytes / (rate * 1e9), model, row.fitted});
  };
  add("dispatch", row.dispatch, request.wire, times->dispatch);
  add("combine", row.combine, Wire::bf16, times->combine);
}

}  // namespace

std::vector<PublishedTime> published_times() {
  std::vector<PublishedTime> all;
  add_low_latency(all);
  for (const Bandwidths& row : {Bandwidths{"normal", "h800", Way::normal, 8, 4096, 153, 158, true, true},
                                Bandwidths{"normal", "h800", Way::normal, 16, 4096, 43, 43, true, false},
                                Bandwidths{"normal", "h800", Way::normal, 32, 4096, 58, 57, true, false},
                                Bandwidths{"normal", "h800", Way::normal, 64, 4096, 51, 50, true, false},
                                Bandwidths{"V2", "h200", Way::elastic, 16, 8192, 90, 81, false, false},
                                Bandwidths{"V2", "h200", Way::elastic, 32, 8192, 61, 61, false, false}})
    add_bandwidths(all, row);
  return all;
}

}  // namespace heddle
