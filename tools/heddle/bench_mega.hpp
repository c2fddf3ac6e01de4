// What was typed behind `heddle bench mega`, and what it means.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench_arguments.hpp"
#include "heddle/shape.hpp"
#include "inputs.hpp"

namespace CLI {
class App;
}

namespace heddle::tool {

struct MegaArguments {
  std::vector<std::string> presets{"deepseek-v4-flash"};
  std::vector<std::string> weights{"mxfp4", "fp8_block", "bf16"};
  std::vector<std::string> ways{"gather", "low_latency", "elastic", "one_sided"};
  std::vector<int> tokens{1, 8, 64, 128, 512, 4096, 8192};
  std::string shape;
  std::optional<int> hidden, intermediate, experts, experts_local, topk;
  /// Where the fused layer runs the model's shared expert, one measurement each: inside, module, extra, none. Empty: the layer has
  /// none.
  std::vector<std::string> shared;
  /// What becomes of the fused layer's results, one measurement each: slots, slots of fp8 or nvfp4, add.
  std::vector<std::string> combines{"slots"};
  bool full_ring = false;      ///< the fused layer with room for all rows that can arrive, too
  std::string shared_weights;  ///< empty: as the model has them
  std::string routing = "uniform", trace;
  int trace_layer = 0, trace_step = 0, trace_expand = 1;
  std::uint64_t seed = 1;
  int ranks = 0, gpus = 0, calls = 10, replays = 20;
  double stream_tbps = 4.5;             ///< of weights
  std::optional<double> tensor_pflops;  ///< default: by the activations
  std::string json, commit;
  std::string tuning;  ///< what way auto chooses by; empty: the shipped table
  int deadline_ms = 10000;
  bool power = false;             ///< loops of replays of at least `seconds`, sampled by NVML
  std::optional<double> seconds;  ///< default: 5
  int batches = 1;                ///< 2: also two batches in flight
  std::optional<int> batch_sms;   ///< of a chain's exchange then; default: share_of_two's
  std::optional<int> attention;   ///< before each batch's layer then, microseconds
};

/// One layer that is measured.
struct MegaShape {
  std::string name;  ///< the preset's
  LayerShape shape;
  WeightKind kind = WeightKind::bf16;
  std::optional<WeightKind> shared_kind;  ///< none: without a shared expert
  int shared_intermediate = 0;
};

/// The weights that the fused layer takes.
extern const std::map<std::string, WeightKind> fused_kinds;

void add_mega_flags(CLI::App& command, MegaArguments& a);
/// Everything that can be said before a GPU is asked. Throws InputError.
void check_arguments(const MegaArguments& a);
/// The layer of one preset and one kind of weights. Throws InputError.
MegaShape mega_shape(const MegaArguments& a, const std::string& preset, WeightKind kind, int ranks);
/// What the routing is drawn or read by, as `heddle bench exchange` takes it.
BenchArguments routing_of(const MegaArguments& a, const LayerShape& shape);

/// The layer and batch that `command` was asked for by the flags of `heddle run`, with the preset's usual weights. Throws
/// InputError without a preset: weights are drawn here.
MegaArguments mega_arguments(const LayerArguments& layer, const std::string& command);

}  // namespace heddle::tool
