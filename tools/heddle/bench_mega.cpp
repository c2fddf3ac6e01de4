// heddle bench mega: the fused layer beside the chains of exchange and experts, whole calls as CUDA graph replays. The flags and
// the order of things; what is measured and printed is bench_mega_run's.
#include "bench_mega.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "bench.hpp"
#include "bench_checks.hpp"
#include "bench_experts.hpp"
#include "bench_machine.hpp"
#include "bench_mega_run.hpp"
#include "command.hpp"
#include "heddle/error.hpp"
#include "inputs.hpp"
#include "words.hpp"

namespace heddle::tool {

const std::map<std::string, WeightKind> fused_kinds{
    {"bf16", WeightKind::bf16}, {"fp8_block", WeightKind::fp8_block}, {"mxfp4", WeightKind::mxfp4}};

namespace {

void add_layer(CLI::App& command, MegaArguments& a) {
  const char* layer = "Layer";
  command.add_option("--preset", a.presets, "published models' shapes (heddle plan --list)")
      ->delimiter(',')
      ->group(layer)
      ->capture_default_str();
  command.add_option("--weights", a.weights, "mxfp4, fp8_block, bf16")->delimiter(',')->group(layer);
  auto* shape = command.add_option("--shape", a.shape, "another hidden and intermediate size, e.g. 4096x2048")->group(layer);
  command.add_option("--hidden", a.hidden, "another hidden size")->group(layer)->check(whole_number)->excludes(shape);
  command.add_option("--intermediate", a.intermediate, "another intermediate size")
      ->group(layer)
      ->check(whole_number)
      ->excludes(shape);
  auto* experts =
      command.add_option("--experts", a.experts, "another number of experts, over all ranks")->group(layer)->check(whole_number);
  command
      .add_option("--experts-local", a.experts_local,
                  "experts a rank instead: with one rank and an eighth of the model's, what one of eight ranks computes")
      ->group(layer)
      ->check(whole_number)
      ->excludes(experts);
  command.add_option("--topk", a.topk, "another number of choices a token (a recording brings its own)")
      ->group(layer)
      ->check(whole_number);
  command
      .add_option("--shared", a.shared,
                  "with the model's shared expert: inside of the fused kernel (as without a value), as a module on a second stream "
                  "before it, as an extra routed expert, or none to compare with")
      ->delimiter(',')
      ->expected(0, 4)
      ->default_str("inside")
      ->group(layer);
  command
      .add_option(
          "--combine", a.combines,
          "what becomes of the fused layer's results: slots, slots in fp8 or nvfp4 (compared with low_latency of that wire), "
          "or add: they are added where they arrive")
      ->delimiter(',')
      ->group(layer)
      ->capture_default_str();
  command.add_flag("--full-ring", a.full_ring, "the fused layer with room for all rows that can arrive, too")->group(layer);
  command.add_option("--shared-weights", a.shared_weights, "another kind of its weights")->group(layer);
}

void add_batch(CLI::App& command, MegaArguments& a) {
  const char* batch = "Batch";
  command.add_option("--tokens", a.tokens, "tokens a rank, 1 to 8192")->delimiter(',')->group(batch);
  command.add_option("--routing", a.routing, "uniform, zipf:EXPONENT or hot:RANK")->group(batch)->capture_default_str();
  auto* trace =
      command.add_option("--trace", a.trace, "recorded routing (.npy), its tokens dealt to the ranks in turn")->group(batch);
  command.add_option("--trace-layer", a.trace_layer, "layer of the recording")->group(batch)->needs(trace)->check(whole_number);
  command.add_option("--trace-step", a.trace_step, "first step of the recording")->group(batch)->needs(trace)->check(whole_number);
  command.add_option("--trace-expand", a.trace_expand, "spread each recorded expert over this many")
      ->group(batch)
      ->needs(trace)
      ->check(whole_number);
  command.add_option("--seed", a.seed, "seed of everything drawn")->group(batch)->capture_default_str()->check(seed_number);
}

void add_longer(CLI::App& command, MegaArguments& a) {
  const char* longer = "Longer";
  auto* power =
      command
          .add_flag("--power", a.power,
                    "for every way and size also a loop of replays, with power, clocks, throttling and temperature of every GPU "
                    "from the driver's NVML at 10 Hz, energy a call and a token, and the sustained time a call")
          ->group(longer);
  command.add_option("--seconds", a.seconds, "of each loop at least (default: 5)")->needs(power)->group(longer);
  auto* batches =
      command
          .add_option(
              "--batches", a.batches,
              "2: for every way and size also two batches in flight, each with half of the SMs for all that waits for other "
              "GPUs at most, against the two in a row and one batch of double size")
          ->group(longer)
          ->capture_default_str();
  command
      .add_option(
          "--batch-sms", a.batch_sms,
          "of two batches in flight: SMs of each one's exchange, its products having the others (default: a quarter, at most "
          "half; mega and auto always half)")
      ->needs(batches)
      ->group(longer);
  command
      .add_option("--attention", a.attention,
                  "of two batches: microseconds of work on all SMs that stand for attention before each one's layer")
      ->needs(batches)
      ->group(longer)
      ->check(whole_number);
}

void add_how(CLI::App& command, MegaArguments& a) {
  const char* how = "How";
  command
      .add_option(
          "--way", a.ways,
          "chains beside it: gather, normal (not as a graph), low_latency, elastic, one_sided, or none; and auto, measured last, "
          "against the fastest of all")
      ->delimiter(',')
      ->group(how);
  command.add_option("--tuning", a.tuning, "what auto chooses by (heddle tune; default: the shipped table)")->group(how);
  command.add_option("--ranks", a.ranks, "ranks (default: one a GPU); more than GPUs: virtual ranks")->group(how);
  command.add_option("--gpus", a.gpus, "GPUs (default: all)")->group(how);
  command.add_option("--calls", a.calls, "calls of the layer a replay, at least; as many as its copies need")
      ->group(how)
      ->capture_default_str();
  command.add_option("--replays", a.replays, "samples")->group(how)->capture_default_str();
  command.add_option("--stream-tbps", a.stream_tbps, "of the floor: weights brought in, TB/s")->group(how)->capture_default_str();
  command
      .add_option("--tensor-pflops", a.tensor_pflops,
                  "of the floor: operations of the tensor cores, PFLOP/s (default: 1.4, with bf16 weights 0.79)")
      ->group(how);
  command.add_option("--deadline-ms", a.deadline_ms, "longest wait for another rank")->group(how)->capture_default_str();
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(how);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(how);
}

void bench_mega(const MegaArguments& arguments, int& status) {
  MegaArguments a = arguments;
  check_arguments(a);
  Lanes lanes(devices_for("mega", a.ranks, a.gpus), std::chrono::milliseconds(a.deadline_ms));
  MegaRun run(a, lanes);
  run_and_save(run, lanes, a.json);
  if (run.wrong() > 0) status = 1;
}

void set_sizes(const MegaArguments& a, LayerShape& shape, int ranks) {
  if (!a.shape.empty()) {
    const ExpertsShape given = shape_of(a.shape);
    shape.hidden = given.hidden;
    shape.intermediate = given.intermediate;
  }
  shape.hidden = a.hidden.value_or(shape.hidden);
  shape.intermediate = a.intermediate.value_or(shape.intermediate);
  shape.experts = a.experts_local ? *a.experts_local * ranks : a.experts.value_or(shape.experts);
  shape.topk = a.topk.value_or(shape.topk);
}

void check_attention(const MegaArguments& a) {
  if (!a.attention) return;
  constexpr int longest = 100'000;
  if (a.batches != 2)
    throw InputError(fmt::format("--attention {}: it stands before two batches in flight; give --batches 2", *a.attention));
  at_least_one("--attention", {*a.attention});
  if (*a.attention > longest) throw InputError(fmt::format("--attention {}: at most {} us a layer", *a.attention, longest));
}

}  // namespace

void check_arguments(const MegaArguments& a) {
  for (const std::string& preset : a.presets) {
    for (const std::string& kind : a.weights) mega_shape(a, preset, value_of(fused_kinds, "--weights", kind), std::max(1, a.ranks));
  }
  one_of("--way", a.ways, {"gather", "normal", "low_latency", "elastic", "one_sided", "auto", "none"});
  one_of("--shared", a.shared, {"inside", "module", "extra", "none"});
  one_of("--combine", a.combines, {"slots", "fp8", "nvfp4", "add"});
  at_least_one("--tokens", a.tokens);
  at_least_one("--calls", {a.calls});
  at_least_one("--replays", {a.replays});
  at_least_one("--deadline-ms", {a.deadline_ms});
  at_least_one("--trace-expand", {a.trace_expand});
  for (const int tokens : a.tokens) {
    if (tokens > 8192) throw InputError(fmt::format("--tokens {}: a rank brings at most 8192 here", tokens));
  }
  if (a.ranks < 0 || a.gpus < 0) throw InputError("--ranks and --gpus cannot be negative");
  constexpr double longest = 600;
  if (const double seconds = a.seconds.value_or(1); !(seconds > 0 && seconds <= longest))
    throw InputError(fmt::format("--seconds {}: more than 0 and at most {} a loop", seconds, longest));
  if (a.batches != 1 && a.batches != 2) throw InputError(fmt::format("--batches {}: 1, or 2 in flight", a.batches));
  if (a.batch_sms) at_least_one("--batch-sms", {*a.batch_sms});
  check_attention(a);
  if (a.power && std::find(a.ways.begin(), a.ways.end(), "normal") != a.ways.end()) {
    throw InputError(
        "--power with --way normal: long loops are replays of a graph, and its host waits for counts in every call, which no graph "
        "can hold; leave one of the two");
  }
  if (!(a.stream_tbps > 0) || !(a.tensor_pflops.value_or(1) > 0))
    throw InputError("--stream-tbps and --tensor-pflops are rates above 0");
}

MegaShape mega_shape(const MegaArguments& a, const std::string& name, WeightKind kind, int ranks) {
  const ModelPreset& preset = find_preset(name);
  if (preset.plan_only) throw InputError(fmt::format("--preset {}: its activation is its own; it serves `heddle plan` only", name));
  MegaShape layer{name, preset.shape, kind, {}, 0};
  set_sizes(a, layer.shape, ranks);
  for (const int size : {layer.shape.hidden, layer.shape.intermediate}) {
    if (size < 64 || size % 64 != 0)
      throw InputError(fmt::format("--hidden and --intermediate are positive multiples of 64, not {}", size));
  }
  at_least_one(a.experts_local ? "--experts-local" : "--experts", {layer.shape.experts});
  at_least_one("--topk", {layer.shape.topk});
  if (a.trace.empty() && layer.shape.topk > layer.shape.experts)
    throw InputError(fmt::format("{} experts are too few for top-{}", layer.shape.experts, layer.shape.topk));
  if (a.shared.empty()) return layer;
  if (preset.shared_experts.value_or(0) == 0) throw InputError(fmt::format("--shared: {} has no shared expert", name));
  layer.shared_kind =
      a.shared_weights.empty() ? shared_kind_of(preset, kind) : value_of(kinds, "--shared-weights", a.shared_weights);
  layer.shared_intermediate = *preset.shared_experts * layer.shape.intermediate;
  return layer;
}

BenchArguments routing_of(const MegaArguments& a, const LayerShape& shape) {
  BenchArguments routing;
  routing.experts = shape.experts;
  routing.topk = shape.topk;
  routing.routing = a.routing;
  routing.trace = a.trace;
  routing.trace_layer = a.trace_layer;
  routing.trace_step = a.trace_step;
  routing.trace_expand = a.trace_expand;
  routing.seed = a.seed;
  return routing;
}

MegaArguments mega_arguments(const LayerArguments& layer, const std::string& command) {
  MegaArguments a;
  a.weights = {drawn_weights(layer, command)};
  a.presets = {layer.preset};
  a.hidden = layer.hidden;
  a.intermediate = layer.intermediate;
  a.experts = layer.experts;
  a.topk = layer.topk;
  a.seed = layer.seed;
  a.ranks = layer.ranks.value_or(0);
  a.gpus = layer.gpus.value_or(0);
  a.deadline_ms = layer.deadline_ms;
  if (!layer.routing.empty()) a.routing = layer.routing;
  a.trace = layer.trace;
  a.trace_layer = layer.trace_layer;
  a.trace_step = layer.trace_step;
  a.trace_expand = layer.trace_expand;
  return a;
}

void add_mega_flags(CLI::App& command, MegaArguments& a) {
  add_layer(command, a);
  add_batch(command, a);
  add_how(command, a);
  add_longer(command, a);
}

void add_bench_mega(CLI::App& bench, int& status) {
  auto a = std::make_shared<MegaArguments>();
  auto* command = bench.add_subcommand("mega", "the fused layer beside the chains of exchange and experts, as CUDA graph replays");
  add_mega_flags(*command, *a);
  command->callback([a, &status] { bench_mega(*a, status); });
}

}  // namespace heddle::tool
