#include "explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "layer/candidates.hpp"

namespace heddle::tool {

namespace {

/// A layer of way auto with the request's shape: what it could choose from on GPUs.
LayerWeights weights_of(const PlanRequest& request) {
  LayerWeights weights;
  weights.shape = request.shape;
  weights.kind = request.weights;
  weights.placement = Placement::contiguous(request.shape.experts, request.ranks);
  return weights;
}

LayerOptions options_of(const PlanRequest& request, const TuningTable& table, const std::string& machine) {
  LayerOptions options;
  options.way = Way::automatic;
  options.cap = request.cap;
  options.activation = request.activation();
  options.wire = request.wire;
  options.combine_wire = request.combine_wire;
  options.combine = request.combine;
  options.quantisation = request.quantisation;
  options.automatic.table = std::make_shared<TuningTable>(table);
  options.automatic.machine = machine;
  return options;
}

/// Of a machine that is none of the planner's GPUs the times are a host's.
Engine engine_of(const std::string& machine) {
  const auto known = machines();
  const bool is_gpu = std::any_of(known.begin(), known.end(), [&](const Machine& one) { return one.title == machine; });
  return is_gpu || machine.find("NVIDIA") != std::string::npos ? Engine::gpus : Engine::host;
}

std::string cell(const WayChoice& choice, Way way) {
  for (const WayTime& time : choice.times) {
    if (time.way == way && time.us) return fmt::format("{:.1f}", *time.us);
  }
  return "-";
}

}  // namespace

std::vector<WayChoice> explain_sizes(const PlanRequest& request, const TuningTable& table, const std::string& machine) {
  check_request(request);
  const LayerWeights weights = weights_of(request);
  const LayerOptions options = options_of(request, table, machine);
  const WayChooser chooser(weights, options, candidates_of(weights, options, engine_of(machine)), machine);
  std::vector<WayChoice> choices;
  for (long long tokens = 1; tokens < request.cap; tokens *= 2)
    choices.push_back(chooser.explain({static_cast<int>(tokens), Phase::decode}));
  choices.push_back(chooser.explain({request.cap, Phase::decode}));
  return choices;
}

void print_choices(const PlanRequest& request, const std::vector<WayChoice>& choices) {
  fmt::print("Way auto on {} ranks, microseconds a call by tokens a rank\n\n{:>8}  {:<12}", request.ranks, "tokens", "way");
  for (const WayTime& time : choices.front().times) fmt::print("{:>13}", name(time.way));
  fmt::print("\n");
  for (const WayChoice& choice : choices) {
    fmt::print("{:>8}  {:<12}", choice.max_tokens, name(choice.way));
    for (const WayTime& time : choice.times) fmt::print("{:>13}", cell(choice, time.way));
    fmt::print("\n");
  }
  fmt::print("\nTimes: {}.\n", choices.front().source);
  fmt::print("At {} tokens:\n", choices.back().max_tokens);
  for (const WayTime& time : choices.back().times) fmt::print("  {}: {}\n", name(time.way), time.terms);
  for (const RefusedWay& one : choices.front().refused) fmt::print("Left out: {}: {}\n", name(one.way), one.reason);
}

nlohmann::ordered_json choices_json(const std::vector<WayChoice>& choices) {
  using Json = nlohmann::ordered_json;
  Json sizes = Json::array();
  for (const WayChoice& choice : choices) {
    Json times = Json::object();
    for (const WayTime& time : choice.times)
      times[std::string(name(time.way))] = {{"us", time.us ? Json(*time.us) : Json(nullptr)}, {"terms", time.terms}};
    sizes.push_back({{"max_tokens", choice.max_tokens}, {"way", name(choice.way)}, {"source", choice.source}, {"times", times}});
  }
  Json refused = Json::object();
  for (const RefusedWay& one : choices.front().refused) refused[std::string(name(one.way))] = one.reason;
  return {{"sizes", sizes}, {"left_out", refused}};
}

}  // namespace heddle::tool
