// heddle replay for programs (docs/json.md lists the names; they are stable).
#include "heddle/version.hpp"
#include "replay.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

Json or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

Json seconds_json(const std::map<Way, double>& seconds) {
  Json json = Json::object();
  for (const auto& [way, value] : seconds) json[std::string(name(way))] = value;
  return json;
}

Json rows_json(const replay::Rows& rows) {
  return {{"received", rows.received}, {"received_remote", rows.received_remote}, {"sent_remote", rows.sent_remote}};
}

Json layer_json(const replay::LayerSummary& layer, bool has_copies) {
  Json json{{"layer", layer.layer},
            {"expert_max_over_mean", layer.expert_max_over_mean},
            {"rank_max_over_mean", layer.rank_max_over_mean},
            {"step_max_over_mean", layer.step_max_over_mean},
            {"worst_max_over_mean", layer.worst_max_over_mean},
            {"copies_per_token", or_null(layer.copies_a_token)},
            {"most_pairs", layer.most_pairs},
            {"most_copies", has_copies ? Json(layer.most_copies) : Json(nullptr)},
            {"expert_load", std::vector<std::int64_t>(layer.expert_load.begin(), layer.expert_load.end())},
            {"ranks", Json::array()},
            {"predicted_seconds", seconds_json(layer.seconds)}};
  for (std::size_t rank = 0; rank < layer.ranks.size(); ++rank) {
    const replay::RankRows& rows = layer.ranks[rank];
    json["ranks"].push_back({{"rank", rank},
                             {"tokens", rows.tokens},
                             {"pairs", rows_json(rows.pairs)},
                             {"copies", has_copies ? rows_json(rows.copies) : Json(nullptr)},
                             {"touched_experts", rows.touched}});
  }
  return json;
}

Json placements_json(const std::vector<replay::PlacementReplay>& placements, bool has_copies) {
  Json list = Json::array();
  for (const replay::PlacementReplay& placement : placements) {
    Json json{{"placement", placement.name},
              {"replicas", placement.replicas},
              {"step_max_over_mean", placement.step_max_over_mean()},
              {"worst_max_over_mean", placement.worst_max_over_mean()},
              {"copies_per_token", or_null(placement.copies_a_token())},
              {"predicted_step_seconds", seconds_json(placement.step_seconds())},
              {"layers", Json::array()}};
    for (const replay::LayerSummary& layer : placement.layers) json["layers"].push_back(layer_json(layer, has_copies));
    list.push_back(std::move(json));
  }
  return list;
}

Json ways_json(const MeasuredPlacement& measured) {
  Json json = Json::object();
  for (const auto& [way, times] : measured.ways) {
    Json layers = Json::array();
    for (const auto& [layer, seconds] : times.layers) layers.push_back({{"layer", layer}, {"seconds", seconds}});
    json[std::string(name(way))] =
        Json{{"step_seconds", times.step}, {"step_max_over_mean", times.max_over_mean}, {"layers", std::move(layers)}};
  }
  return json;
}

Json measured_json(const Measured& measured, const std::string& engine) {
  if (measured.empty()) return nullptr;
  Json json{{"engine", engine}, {"ways", ways_json(measured.front())}, {"with_replicas", nullptr}};
  if (measured.size() > 1) json["with_replicas"] = Json{{"replicas", measured[1].replicas}, {"ways", ways_json(measured[1])}};
  return json;
}

Json predicted_for(const ReplayReport& report) {
  if (!report.options.request) return nullptr;
  const PlanRequest& request = *report.options.request;
  return {{"machine", request.machine.name},
          {"hidden", request.shape.hidden},
          {"intermediate", request.shape.intermediate},
          {"weights", word_of(kinds, request.weights)},
          {"wire", word_of(wires, request.wire)},
          {"combine_wire", word_of(wires, request.combine_wire)}};
}

}  // namespace

Json replay_json(const ReplayReport& report) {
  const replay::Source& source = report.source;
  return {{"heddle", version},
          {"recording",
           {{"file", report.arguments.recording},
            {"kind", report.kind},
            {"layers", source.layers},
            {"topk", source.topk > 0 ? Json(source.topk) : Json(nullptr)}}},
          {"ranks", report.options.ranks},
          {"experts", source.experts},
          {"steps", source.steps},
          {"tokens_per_step", source.tokens > 0 ? Json(source.tokens) : Json(nullptr)},
          {"nodes", report.options.nodes},
          {"copies", word_of(copy_rules, report.options.rule)},
          {"notes", report.notes},
          {"predicted_for", predicted_for(report)},
          {"placements", placements_json(report.result.placements, source.has_copies)},
          {"unseen", placements_json(report.result.unseen, source.has_copies)},
          {"measured", measured_json(report.measured, report.arguments.engine)}};
}

}  // namespace heddle::tool
