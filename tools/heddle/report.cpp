#include "report.hpp"

#include <fmt/format.h>

#include <sstream>

#include "heddle/version.hpp"
#include "layer/options.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

Json phases_of(const JobResult& result, int nodes) {
  const std::pair<const char*, PhaseReport LayerReport::*> phases[] = {
      {"dispatch", &LayerReport::dispatch},     {"regroup", &LayerReport::regroup}, {"gemm1", &LayerReport::gemm1},
      {"activation", &LayerReport::activation}, {"gemm2", &LayerReport::gemm2},     {"combine", &LayerReport::combine}};
  Json json = Json::object();
  for (const auto& [name, member] : phases) {
    const PhaseReport total = result.total(member);
    json[name] = {{"seconds", total.seconds}, {"remote_bytes", total.remote_bytes}, {"local_bytes", total.local_bytes}};
    if (nodes > 1) json[name]["between_bytes"] = total.between_bytes;
  }
  return json;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::string title_of(const LayerOptions& options) {
  std::string title(name(options.way));
  if (options.way == Way::elastic) title += fmt::format(" (reduce={})", word_of(reduces, options.reduce));
  if (options.mode == NodeMode::hybrid) title += " (hybrid)";
  if (options.way == Way::gather && options.tensor_parallel) title += " (tensor-parallel)";
  if (options.expert_slices) title += " (slices)";
  if (options.combine == Combine::add) title += " (combine=add)";
  if (options.way == Way::mega && options.ring == RingSize::full) title += " (ring=full)";
  if (options.way == Way::gather && options.gather != GatherMode::padded && !options.tensor_parallel)
    title += fmt::format(" ({})", word_of(gather_modes, options.gather));
  return title;
}

std::string title_of(const LayerOptions& asked, const JobResult& result) {
  return (asked.way == Way::automatic ? "auto: " : "") + title_of(result.options);
}

Json configuration_of(const Inputs& inputs, const LayerOptions& options, const JobResult& result) {
  const LayerShape& shape = inputs.source.shape;
  const Activation activation = activation_of(inputs.source.kind, options);
  Json json{{"engine", inputs.gpus > 0 ? "cuda" : "host"},
            {"processes", inputs.processes},
            {"ranks", inputs.ranks},
            {"way", name(result.options.way)},
            {"asked_way", name(options.way)},
            {"layout", name(result.exchange.arrived)},
            {"hidden", shape.hidden},
            {"intermediate", shape.intermediate},
            {"experts", shape.experts},
            {"topk", shape.topk},
            {"tokens", inputs.tokens()},
            {"tokens_per_rank", inputs.tokens_per_rank},
            {"cap", options.cap},
            {"weights", word_of(kinds, inputs.source.kind)},
            {"activation", word_of(activations, activation)},
            {"group", options.quantisation.group},
            {"scale", word_of(scales, options.quantisation.scale)},
            {"weight_at", word_of(weight_places, options.weight_at)},
            {"wire", word_of(wires, result.exchange.wire)},
            {"combine_wire", word_of(wires, options.combine_wire)},
            {"reduce", word_of(reduces, options.reduce)},
            {"cpu_sync", options.cpu_sync},
            {"gather", word_of(gather_modes, options.gather)},
            {"tensor_parallel", options.tensor_parallel},
            {"expert_slices", options.expert_slices},
            {"shared", inputs.source.shared ? word_of(shared_modes, options.shared) : "none"},
            {"overflow", word_of(overflows, options.overflow)},
            {"workers", options.workers},
            {"deadline_ms", inputs.deadline_ms}};
  if (result.options.way == Way::mega) {
    json["block_rows"] = options.block_rows;
    json["ring"] = word_of(ring_sizes, options.ring);
    json["combine"] = word_of(combines, options.combine);
  }
  if (inputs.nodes > 1) {
    json["nodes"] = inputs.nodes;
    json["mode"] = word_of(node_modes, options.mode);
  }
  if (inputs.gpus > 0) {
    json["gpus"] = inputs.gpus;
    json["experts_engine"] = inputs.host_experts ? "host" : "cuda";
  }
  json["shared_weights"] = inputs.source.shared ? Json(word_of(kinds, inputs.source.shared->weights.gate.kind)) : Json(nullptr);
  json["clamp"] = options.clamp ? Json(*options.clamp) : Json(nullptr);
  json["notes"] = inputs.notes;
  return json;
}

Json report_of(const Inputs& inputs, const LayerOptions& options, const JobResult& result) {
  Json per_rank = Json::array();
  for (std::size_t rank = 0; rank < result.reports.size(); ++rank) {
    const LayerReport& report = result.reports[rank];
    per_rank.push_back({{"rank", rank},
                        {"rows_sent", report.rows_sent},
                        {"rows_received", report.rows_received},
                        {"rows_real", report.rows_real},
                        {"rows_room", report.rows_room}});
  }
  Json json{{"heddle", version},
            {"configuration", configuration_of(inputs, options, result)},
            {"passes", result.reports.front().passes},
            {"seconds", result.seconds},
            {"phases", phases_of(result, inputs.nodes)},
            {"per_rank", per_rank},
            {"copies_per_token", result.copies},
            {"host_waited", result.reports.front().host_waited},
            {"buffer_bytes", result.heap_bytes},
            {"kernels_launched", result.kernels}};
  if (options.way == Way::automatic) json["choice"] = lines_of(result.choice);
  if (inputs.host_experts) return json;
  json["experts_seconds"] = result.slowest(&LayerReport::experts_seconds);
  json["shared_seconds"] = result.slowest(&LayerReport::shared_seconds);
  return json;
}

}  // namespace heddle::tool
