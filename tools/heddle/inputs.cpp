#include "inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <future>
#include <optional>
#include <thread>

#include "gpu_job.hpp"
#include "group/memory.hpp"
#include "heddle/plan.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

/// Drawn weights are memory that is written. Sizes are multiplied as double: they may be beyond 64 bits.
void check_memory(const SyntheticOptions& options) {
  const LayerShape& shape = options.shape;
  const double router = 4.0 * shape.hidden;
  const double needed = shape.experts * (static_cast<double>(expert_weight_bytes(shape, options.kind).total()) + router);
  const auto available = available_memory();
  if (needed <= static_cast<double>(available)) return;
  throw InputError(
      fmt::format("{} experts of {} x {} take {:.1f} GiB, {} of memory are free; give a smaller --experts, --hidden or "
                  "--intermediate",
                  shape.experts, shape.hidden, shape.intermediate, needed / (1 << 30), describe_bytes(available)));
}

void load_layer(const LayerArguments& a, Inputs& inputs, RouterOptions& router) {
  if (a.layer.empty() == a.preset.empty())
    throw InputError("give either --layer FILE or --preset NAME (heddle plan --list shows presets)");
  if (!a.layer.empty()) {
    inputs.checkpoint = std::make_unique<LayerCheckpoint>(LayerCheckpoint::open(a.layer, {a.layer_index}));
    inputs.source = source_of(*inputs.checkpoint);
    if (inputs.checkpoint->has_router() && inputs.checkpoint->router_options()) router = *inputs.checkpoint->router_options();
    return;
  }
  const ModelPreset& preset = find_preset(a.preset);
  if (preset.plan_only) {
    throw InputError(fmt::format("preset {} has an activation of its own and serves `heddle plan` only{}{}", preset.name,
                                 preset.note.empty() ? "" : ": ", preset.note));
  }
  SyntheticOptions options;
  options.shape = preset.shape;
  if (a.hidden) options.shape.hidden = *a.hidden;
  if (a.intermediate) options.shape.intermediate = *a.intermediate;
  if (a.experts) options.shape.experts = *a.experts;
  for (const int size : {options.shape.hidden, options.shape.intermediate}) {
    if (size < 64 || size % 64 != 0)
      throw InputError(fmt::format("hidden and intermediate sizes are positive multiples of 64, not {}", size));
  }
  if (options.shape.experts < 1) throw InputError(fmt::format("--experts {}: at least 1 is needed", options.shape.experts));
  if (a.weights.empty() && preset.weights.empty())
    throw InputError(fmt::format("the weight format of {} is not confirmed; give --weights", preset.name));
  options.kind = a.weights.empty() ? preset.weights.front() : value_of(kinds, "--weights", a.weights);
  check_memory(options);
  if (preset.shared_experts.value_or(0) > 0) {
    options.shared_kind = shared_kind_of(preset, options.kind);
    options.shared_intermediate = *preset.shared_experts * options.shape.intermediate;
  }
  options.seed = a.seed;
  if (preset.router) {
    router = {preset.router->score,
              options.shape.topk,
              preset.router->groups,
              preset.router->topk_groups,
              preset.router->renormalise.value_or(true),
              preset.router->scale.value_or(1.0f)};
    options.selection_bias = preset.router->selection_bias;
  }
  inputs.synthetic = std::make_unique<SyntheticLayer>(options);
  inputs.source = inputs.synthetic->source();
  inputs.notes.push_back(fmt::format("weights drawn from seed {}", a.seed));
}

void take_router_flags(const LayerArguments& a, const Inputs& inputs, RouterOptions& router) {
  if (!a.score.empty()) router.score = value_of(scores, "--score", a.score);
  router.topk = a.topk.value_or(inputs.source.shape.topk);
  if (a.groups) router.groups = *a.groups;
  if (a.topk_groups) router.topk_groups = *a.topk_groups;
  if (a.renormalise) router.renormalise = true;
  if (a.no_renormalise) router.renormalise = false;
  if (a.route_scale) router.scale = *a.route_scale;
}

/// The whole text as a number, or nothing.
template <class Number>
std::optional<Number> number_of(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<float> clamp_of(const std::string& typed, const std::optional<float>& given) {
  if (typed.empty()) return given;
  if (typed == "none") return std::nullopt;
  const auto value = number_of<float>(typed);
  if (!value || !(*value > 0)) throw InputError(fmt::format("--clamp takes a positive number or none, not '{}'", typed));
  return value;
}

LayerOptions options_of(const LayerArguments& a, const Inputs& inputs) {
  LayerOptions options;
  options.runner = value_of(runners, "--runner", a.runner);
  if (!a.activation.empty()) options.activation = value_of(activations, "--activation", a.activation);
  if (a.group != 128 && a.group != 32) throw InputError(fmt::format("--group takes 128 or 32, not {}", a.group));
  options.quantisation = {a.group, value_of(scales, "--scale", a.scale)};
  if (!a.wire.empty()) options.wire = value_of(wires, "--wire", a.wire);
  if (!a.combine_wire.empty()) options.combine_wire = value_of(wires, "--combine-wire", a.combine_wire);
  options.weight_at = value_of(weight_places, "--weight-at", a.weight_at);
  options.reduce = value_of(reduces, "--reduce", a.reduce);
  options.mode = value_of(node_modes, "--mode", a.mode);
  options.combine = value_of(combines, "--combine", a.combine);
  options.cpu_sync = a.cpu_sync;
  options.gather = value_of(gather_modes, "--gather", a.gather);
  options.clamp = clamp_of(a.clamp, inputs.source.shape.clamp);
  options.shared = value_of(shared_modes, "--shared", a.shared);
  options.tensor_parallel = a.tensor_parallel;
  options.expert_slices = a.expert_slices;
  options.workers = a.workers;
  options.block_rows = a.block_rows;
  options.ring = value_of(ring_sizes, "--ring", a.ring);
  options.overflow = value_of(overflows, "--overflow", a.overflow);
  options.automatic.sums = value_of(sum_orders, "--sums", a.sums);
  if (!a.tuning.empty()) options.automatic.table = std::make_shared<TuningTable>(TuningTable::read(a.tuning));
  for (const std::string& word : a.candidates) options.automatic.ways.push_back(real_way(word, "--candidates"));
  return options;
}

Routing recorded(const LayerArguments& a, Inputs& inputs, int tokens) {
  const Recording recording = Recording::open(a.trace);
  if (a.trace_expand < 1) throw InputError(fmt::format("--trace-expand {}: at least 1 is needed", a.trace_expand));
  const long long experts_needed = static_cast<long long>(recording.least_experts()) * a.trace_expand;
  if (experts_needed > inputs.source.shape.experts) {
    throw InputError(
        fmt::format("{} names expert {}, the layer has {}; give a layer or preset with as many, or a smaller --trace-expand",
                    a.trace, experts_needed - 1, inputs.source.shape.experts));
  }
  Routing routing = recording.take(a.trace_layer, a.trace_step, tokens);
  inputs.notes.push_back(fmt::format("routing recorded from {}, layer {}, step {}", a.trace, a.trace_layer, a.trace_step));
  if (a.trace_expand > 1) {
    routing = expand(routing, a.trace_expand);
    inputs.notes.back() += fmt::format(", expanded {} times", a.trace_expand);
  }
  return routing;
}

Popularity popularity_of(const LayerArguments& a, const Inputs& inputs) {
  const int experts = inputs.source.shape.experts;
  const auto colon = a.routing.find(':');
  const std::string kind = a.routing.substr(0, colon);
  const std::string value = colon == std::string::npos ? "" : a.routing.substr(colon + 1);
  if (kind == "uniform" && value.empty()) return uniform_popularity(experts);
  if (const auto exponent = number_of<double>(value); kind == "zipf" && exponent)
    return zipf_popularity(experts, *exponent, a.seed);
  if (const auto rank = number_of<int>(value); kind == "hot" && rank) {
    return hot_rank_popularity(Placement::contiguous(experts, inputs.ranks), *rank);
  }
  if (kind == "counts" && !value.empty()) {
    const auto tables = read_expert_counts(value);
    for (const auto& table : tables) {
      if (static_cast<int>(table.counts.size()) == experts) return table.counts;
    }
    throw InputError(fmt::format("{} has no row of {} experts", value, experts));
  }
  throw InputError(fmt::format("--routing takes uniform, zipf:EXPONENT, hot:RANK or counts:FILE, not '{}'", a.routing));
}

Routing routed_here(const Inputs& inputs, const RouterOptions& router, int tokens) {
  const LayerShape& shape = inputs.source.shape;
  const bool from_file = inputs.checkpoint != nullptr;
  if (from_file && !inputs.checkpoint->has_router()) {
    throw InputError(
        "the batch has no topk_ids and the layer no router; add topk_ids and topk_weights to the batch, or take --trace or "
        "--routing");
  }
  if (from_file && !inputs.checkpoint->router_options() && router.topk < 1)
    throw InputError("no config.json says how the router scores; give --topk and --score");
  const std::span<const float> weights =
      from_file ? inputs.checkpoint->router_weights() : std::span<const float>(inputs.synthetic->router_weights());
  const std::span<const float> bias =
      from_file ? inputs.checkpoint->router_bias() : std::span<const float>(inputs.synthetic->router_bias());
  const auto logits = router_logits(inputs.hidden_states, weights, tokens, shape.hidden, shape.experts);
  return route(logits, bias, tokens, shape.experts, router);
}

void load_tokens(const LayerArguments& a, Inputs& inputs, const RouterOptions& router) {
  const int hidden = inputs.source.shape.hidden;
  int tokens = a.tokens.value_or(64 * inputs.ranks);
  if (tokens < 0) throw InputError(fmt::format("--tokens {}: a batch has 0 or more", tokens));
  std::optional<Routing> given;
  if (!a.batch.empty()) {
    Batch batch = read_batch(a.batch);
    if (batch.hidden != hidden)
      throw InputError(
          fmt::format("{}: hidden_states has {} columns, the layer's hidden size is {}", a.batch, batch.hidden, hidden));
    if (a.tokens) throw InputError("--tokens goes without --batch, which says how many there are");
    tokens = batch.tokens;
    inputs.hidden_states = std::move(batch.hidden_states);
    inputs.tokens_per_rank = std::move(batch.tokens_per_rank);
    given = std::move(batch.routing);
  } else {
    if (a.hidden_states != "gaussian" && a.hidden_states != "heavy_tailed")
      throw InputError(fmt::format("--hidden-states takes gaussian or heavy_tailed, not '{}'", a.hidden_states));
    inputs.hidden_states = draw_hidden_states(
        tokens, hidden, a.hidden_states == "gaussian" ? HiddenStates::gaussian : HiddenStates::heavy_tailed, a.seed);
    inputs.notes.push_back(fmt::format("hidden states drawn from seed {} ({})", a.seed, a.hidden_states));
  }
  if (!a.trace.empty() && !a.routing.empty()) throw InputError("--trace and --routing both choose the experts; give one of them");
  if (!a.trace.empty()) {
    inputs.routing = recorded(a, inputs, tokens);
  } else if (!a.routing.empty()) {
    if (router.topk < 1) throw InputError("--routing needs --topk: neither layer nor flags say how many experts a token has");
    inputs.routing = draw_routing(popularity_of(a, inputs), {tokens, router.topk, a.seed, 0.0, 1.0f});
    inputs.notes.push_back(fmt::format("routing drawn: {}", a.routing));
  } else if (given) {
    inputs.routing = std::move(*given);
  } else {
    inputs.routing = routed_here(inputs, router, tokens);
    inputs.router_chose = true;
  }
  if (a.topk && *a.topk != inputs.routing.topk) {
    throw InputError(fmt::format("--topk says {}, but {} brings {} choices a token", *a.topk, a.trace.empty() ? a.batch : a.trace,
                                 inputs.routing.topk));
  }
  check_choices(inputs.routing.ids, inputs.routing.tokens, inputs.routing.topk, inputs.source.shape.experts);
  inputs.source.shape.topk = inputs.routing.topk;
}

void split_tokens(const LayerArguments& a, Inputs& inputs) {
  auto& split = inputs.tokens_per_rank;
  if (split.empty()) {
    for (int r = 0; r < inputs.ranks; ++r)
      split.push_back(inputs.tokens() / inputs.ranks + (r < inputs.tokens() % inputs.ranks ? 1 : 0));
  }
  if (static_cast<int>(split.size()) != inputs.ranks) {
    throw InputError(fmt::format("{}: tokens_per_rank is for {} ranks, --ranks says {}", a.batch, split.size(), inputs.ranks));
  }
  const int most = *std::max_element(split.begin(), split.end());
  inputs.options.cap = a.cap.value_or(std::max(1, most));
  if (inputs.options.cap < most && inputs.options.overflow == Overflow::error) {
    throw InputError(fmt::format("a rank brings {} tokens, --cap is {}; a cap of at least {} is needed, or --overflow split", most,
                                 inputs.options.cap, most));
  }
}

int nodes_of(const LayerArguments& a, int ranks) {
  if (a.nodes < 1 || ranks % a.nodes != 0)
    throw InputError(fmt::format("--nodes {} does not divide {} ranks; nodes have equally many", a.nodes, ranks));
  if (a.nodes > 1 && a.processes)
    throw InputError("--nodes are virtual ones of this process; leave --processes (docs/nodes.md has real ones)");
  if (a.nodes > 1 && a.tensor_parallel)
    throw InputError("--tensor-parallel: outputs are not gathered across --nodes; take one of the two");
  return a.nodes;
}

/// Asks for every expert once: what is damaged in a file shows before ranks start (or they would wait for the one that found
/// it), and the experts drawn from a seed are there for all ranks, also for processes.
void load_experts(const LayerSource& source) {
  std::atomic<int> next{0};
  const auto load = [&] {
    for (int expert = next++; expert < source.shape.experts; expert = next++) source.expert(expert);
  };
  std::vector<std::future<void>> helpers;  // their destructors wait
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) helpers.push_back(std::async(std::launch::async, load));
  load();
  for (auto& helper : helpers) helper.get();
}

}  // namespace

Way real_way(const std::string& word, const char* option) {
  const auto way = find_way(word);
  if (way && *way != Way::automatic) return *way;
  std::string known;
  for (const Way one : real_ways) known += fmt::format("{}{}", known.empty() ? "" : ", ", name(one));
  throw InputError(fmt::format("{} does not know '{}'; it takes {}", option, word, known));
}

WeightKind shared_kind_of(const ModelPreset& preset, WeightKind routed) {
  const bool is_presets = std::find(preset.weights.begin(), preset.weights.end(), routed) != preset.weights.end();
  return is_presets ? preset.shared_weights.value_or(routed) : routed;
}

std::string drawn_weights(const LayerArguments& layer, const std::string& command) {
  if (layer.preset.empty())
    throw InputError(fmt::format(
        "{} --engine cuda draws weights: give --preset NAME, and --hidden, --intermediate, --experts or --topk", command));
  const ModelPreset& preset = find_preset(layer.preset);
  if (layer.weights.empty() && preset.weights.empty())
    throw InputError(fmt::format("the weight format of {} is not confirmed; give --weights", preset.name));
  return layer.weights.empty() ? word_of(kinds, preset.weights.front()) : layer.weights;
}

Inputs load_inputs(const LayerArguments& a) {
  Inputs inputs;
  if (!a.ranks) throw InputError("give --ranks N");
  inputs.ranks = *a.ranks;
  if (inputs.ranks < 1 || inputs.ranks > 1024) throw InputError(fmt::format("--ranks {}: 1 to 1024 are possible", inputs.ranks));
  inputs.nodes = nodes_of(a, inputs.ranks);
  inputs.host_experts = host_experts_of(a);
  inputs.gpus = gpus_of(a, inputs.ranks);  // before anything that uses CUDA: it forks
  if (inputs.nodes > 1 && (inputs.gpus > 1 || (inputs.gpus > 0 && inputs.host_experts)))
    throw InputError(
        "--nodes with --engine cuda are virtual ones that share one GPU with their experts; give --gpus 1, and leave "
        "--experts-engine");
  if (a.deadline_ms < 1) throw InputError(fmt::format("--deadline-ms {}: at least 1 is needed", a.deadline_ms));
  RouterOptions router;
  router.topk = 0;
  load_layer(a, inputs, router);
  if (a.shared_mxfp4) {
    if (!inputs.source.shared) throw InputError("--shared-mxfp4: the layer has no shared expert");
    inputs.source.shared = to_mxfp4(*inputs.source.shared);
    inputs.notes.push_back("shared expert converted to mxfp4");
  }
  take_router_flags(a, inputs, router);
  load_tokens(a, inputs, router);
  inputs.options = options_of(a, inputs);
  inputs.source.shape.clamp = inputs.options.clamp;  // `--clamp none` takes the model's away
  split_tokens(a, inputs);
  inputs.processes = a.processes;
  inputs.deadline_ms = a.deadline_ms;
  if (inputs.gpus > 0 && inputs.host_experts)
    inputs.notes.push_back(fmt::format("rows travel on {} GPUs, experts run on the host engine", inputs.gpus));
  load_experts(inputs.source);
  return inputs;
}

}  // namespace heddle::tool
