// What `heddle run`, `heddle verify` and `heddle trace` work on: a layer, a batch and options, from files, presets,
// recordings or seeds.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heddle/checkpoint.hpp"
#include "heddle/layer.hpp"
#include "heddle/plan.hpp"
#include "heddle/routing.hpp"
#include "layer/synthetic.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

/// What was typed; what was not is empty.
struct LayerArguments {
  std::string layer, batch, preset, weights, trace, routing, hidden_states = "gaussian", save_inputs;
  std::optional<int> layer_index, ranks, gpus, cap, hidden, intermediate, experts, topk, tokens;
  std::uint64_t seed = 0;
  int trace_layer = 0, trace_step = 0, trace_expand = 1;
  std::string score, clamp;
  std::optional<int> groups, topk_groups;
  bool renormalise = false, no_renormalise = false;
  std::optional<float> route_scale;
  std::string engine = "host", experts_engine, runner = "auto", activation, scale = "ue8m0", weight_at = "activation",
              reduce = "rank", combine = "slots", wire, combine_wire, gather = "padded", shared = "alone", deepep_mode = "normal",
              ring = "live", overflow = "error", tuning, sums = "any", mode = "direct";
  std::vector<std::string> candidates;  ///< of way auto
  int group = 128, workers = 1, deadline_ms = 30000, block_rows = 128, nodes = 1;
  bool processes = false, cpu_sync = false, tensor_parallel = false, expert_slices = false, shared_mxfp4 = false;
};

/// Adds the flags that run, verify and trace share.
void add_layer_arguments(CLI::App& command, LayerArguments& arguments);

/// A drawn shared expert is of the preset's kind beside the preset's routed experts, and like the routed ones where they are made
/// others: then the layer takes what those ask for, bf16 activations, say.
WeightKind shared_kind_of(const ModelPreset& preset, WeightKind routed);

/// Everything loaded and checked.
struct Inputs {
  std::unique_ptr<LayerCheckpoint> checkpoint;  ///< one of these two owns the weights
  std::unique_ptr<SyntheticLayer> synthetic;
  LayerSource source;
  Routing routing;
  std::vector<bf16> hidden_states;
  std::vector<int> tokens_per_rank;
  int ranks = 1;
  int nodes = 1;  ///< virtual ones, which share the ranks equally
  bool router_chose = false;
  std::vector<std::string> notes;  ///< what a reader should know, e.g. that ids were expanded
  LayerOptions options;            ///< way left to the caller
  bool processes = false;
  int gpus = 0;               ///< of --engine cuda; 0: the host engine
  bool host_experts = false;  ///< on the host engine, and where only rows travel on GPUs
  int deadline_ms = 30000;

  int tokens() const { return routing.tokens; }
};

/// Throws InputError: one line, what, where, what would be right.
Inputs load_inputs(const LayerArguments& arguments);

/// The weight format that `command` draws on GPUs: as typed, else the preset's. Throws InputError without a preset, or where
/// neither says one.
std::string drawn_weights(const LayerArguments& layer, const std::string& command);

/// Writes layer.safetensors, batch.safetensors and config.json that give the same run again.
void save_inputs(const Inputs& inputs, const std::string& folder);

/// A way by our name, `auto` left out. Throws InputError that lists the names.
Way real_way(const std::string& word, const char* option);

/// The options of a way, by our name or by the value of an engine's flag, which may imply wires (mori's quantised ones) where
/// none were typed. `auto` is the layer's to choose by (docs/choosing.md); where rows alone travel on GPUs, it is the planner's
/// fastest exchange. Throws InputError that lists the names.
LayerOptions options_of_way(const std::string& name, const LayerArguments& arguments, const Inputs& inputs);

}  // namespace heddle::tool
