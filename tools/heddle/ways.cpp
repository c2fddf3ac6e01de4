// Names of ways: ours, and the values of engines' flags (exchange-ways article, section 9.1).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "heddle/plan.hpp"
#include "heddle/tuning.hpp"
#include "inputs.hpp"
#include "layer/candidates.hpp"
#include "layer/options.hpp"

namespace heddle::tool {

namespace {

/// Engines' names beside our own.
const std::map<std::string, Way> engine_names{
    {"none", Way::gather},      {"deepep_v2", Way::elastic},    {"flashinfer", Way::one_sided}, {"megamoe", Way::mega},
    {"pplx", Way::low_latency}, {"mooncake", Way::low_latency}, {"nixl", Way::low_latency},     {"flashinfer_megamoe", Way::mega}};

constexpr Way unfused[] = {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided};

/// A way, and the wires that its name implies.
struct NamedWay {
  Way way = Way::low_latency;
  std::optional<Wire> wire, combine_wire;
};

/// Where rows alone travel on GPUs a layer has one exchange: the planner's fastest for this shape and batch.
Way fastest_exchange(const Inputs& inputs) {
  const LayerWeights weights =
      LayerWeights::common(inputs.source, default_placement(inputs.source.shape, inputs.ranks, inputs.options));
  const int most = *std::max_element(inputs.tokens_per_rank.begin(), inputs.tokens_per_rank.end());
  return choose_way({}, {}, plan_request(weights, inputs.options), unfused, most).way;
}

NamedWay named_way(const std::string& typed, const LayerArguments& arguments, const Inputs& inputs) {
  if (typed == "ascend_fuseep" || typed == "ascend_tp")
    throw InputError(fmt::format("--way {} is for Ascend NPUs, which Heddle does not run on", typed));
  if (typed == "mori") return {Way::normal, Wire::nvfp4, Wire::fp8};
  const bool rows_alone = inputs.gpus > 0 && inputs.host_experts;
  if (typed == "auto" && rows_alone) return {fastest_exchange(inputs), {}, {}};
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
  const auto engines = engine_names.find(typed);
  const auto way = engines != engine_names.end() ? std::optional(engines->second) : find_way(typed);
  if (!way) {
    throw InputError(fmt::format(
        "--way does not know '{}'; it takes gather, normal, low_latency, elastic, one_sided, mega, auto, or an engine's "
        "none, deepep, deepep_v2, flashinfer, megamoe, flashinfer_megamoe, pplx, mooncake, nixl, mori",
        typed));
  }
  if (*way == Way::mega && rows_alone) {
    throw InputError(
        "--way mega: experts are part of the fused layer's kernel and cannot stay on the host; take --experts-engine cuda, "
        "--engine host, or another way");
  }
  return {*way, {}, {}};
}

}  // namespace

LayerOptions options_of_way(const std::string& typed, const LayerArguments& arguments, const Inputs& inputs) {
  const NamedWay choice = named_way(typed, arguments, inputs);
  LayerOptions options = inputs.options;
  options.way = choice.way;
  if (choice.wire && arguments.wire.empty()) options.wire = choice.wire;
  if (choice.combine_wire && arguments.combine_wire.empty()) options.combine_wire = *choice.combine_wire;
  return options;
}

}  // namespace heddle::tool
