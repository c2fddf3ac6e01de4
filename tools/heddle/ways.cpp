// Names of ways: ours, and the values of engines' flags (exchange-ways article, section 9.1).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "heddle/plan.hpp"
#include "inputs.hpp"

namespace heddle::tool {

namespace {

const std::map<std::string, Way> names{
    {"gather", Way::gather},        {"normal", Way::normal},           {"low_latency", Way::low_latency},
    {"elastic", Way::elastic},      {"one_sided", Way::one_sided},     {"mega", Way::mega},
    {"none", Way::gather},          {"deepep_v2", Way::elastic},       {"flashinfer", Way::one_sided},
    {"megamoe", Way::mega},         {"flashinfer_megamoe", Way::mega}, {"pplx", Way::low_latency},
    {"mooncake", Way::low_latency}, {"nixl", Way::low_latency}};

constexpr Way unfused[] = {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided};

/// A way, and the wires that its name implies.
struct WayChoice {
  Way way = Way::low_latency;
  std::optional<Wire> wire, combine_wire;
};

/// The planner's fastest way on an H200 for this shape and batch: the same on all ranks, since all see the same numbers.
Way fastest(const Inputs& inputs) {
  PlanRequest request;
  request.shape = inputs.source.shape;
  request.weights = inputs.source.kind;
  request.ranks = inputs.ranks;
  request.tokens = std::max(1, *std::max_element(inputs.tokens_per_rank.begin(), inputs.tokens_per_rank.end()));
  request.cap = request.tokens;
  request.wire = request.activation() == Activation::fp8 ? Wire::fp8 : Wire::bf16;
  request.machine = find_machine("h200");
  Way best = Way::gather;
  std::optional<double> least;
  for (const Way way : unfused) {
    const auto estimate = estimate_time(way, request);
    if (estimate && (!least || estimate->total < *least)) {
      best = way;
      least = estimate->total;
    }
  }
  return best;
}

WayChoice choose_way(const std::string& typed, const LayerArguments& arguments, const Inputs& inputs) {
  if (typed == "ascend_fuseep" || typed == "ascend_tp")
    throw InputError(fmt::format("--way {} is for Ascend NPUs, which Heddle does not run on", typed));
  if (typed == "mori") return {Way::normal, Wire::nvfp4, Wire::fp8};
  if (typed == "auto") return {fastest(inputs), {}, {}};
  const std::string& mode = arguments.deepep_mode;
  if (mode != "normal" && mode != "low_latency" && mode != "auto") {
    throw InputError(fmt::format("--deepep-mode does not know '{}'; it takes normal, low_latency, auto", mode));
  }
  if (typed == "deepep") {
    if (mode == "normal") return {Way::normal, {}, {}};
    // As the engine's auto mode: batches with prompt tokens go through normal, pure decode through low_latency; a
    // file does not say which it is, and the cap of low_latency's usual deployments is 128 rows.
    const int most = *std::max_element(inputs.tokens_per_rank.begin(), inputs.tokens_per_rank.end());
    return {mode == "low_latency" || most <= 128 ? Way::low_latency : Way::normal, {}, {}};
  }
  const auto found = names.find(typed);
  if (found == names.end()) {
    throw InputError(fmt::format(
        "--way does not know '{}'; it takes gather, normal, low_latency, elastic, one_sided, mega, auto, or an engine's "
        "none, deepep, deepep_v2, flashinfer, megamoe, flashinfer_megamoe, pplx, mooncake, nixl, mori",
        typed));
  }
  if (found->second == Way::mega && inputs.gpus > 0 && inputs.host_experts) {
    throw InputError(
        "--way mega: experts are part of the fused layer's kernel and cannot stay on the host; take --experts-engine cuda, "
        "--engine host, or another way");
  }
  return {found->second, {}, {}};
}

}  // namespace

LayerOptions options_of_way(const std::string& typed, const LayerArguments& arguments, const Inputs& inputs) {
  const WayChoice choice = choose_way(typed, arguments, inputs);
  LayerOptions options = inputs.options;
  options.way = choice.way;
  if (choice.wire && arguments.wire.empty()) options.wire = choice.wire;
  if (choice.combine_wire && arguments.combine_wire.empty()) options.combine_wire = *choice.combine_wire;
  return options;
}

}  // namespace heddle::tool
