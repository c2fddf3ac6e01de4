// heddle replay: what a recording of router decisions asks of ranks, how long the ways take, and what a better placement saves.
#include "replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "command.hpp"
#include "heddle/error.hpp"
#include "heddle/tuning.hpp"
#include "json_file.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

void check_numbers(const ReplayArguments& a) {
  if (!a.ranks) throw InputError("give --ranks N");
  if (*a.ranks < 1 || *a.ranks > 1024) throw InputError(fmt::format("--ranks {}: 1 to 1024 are possible", *a.ranks));
  if (a.experts && (*a.experts < 1 || *a.experts > most_recorded_experts))
    throw InputError(fmt::format("--experts {}: 1 to {} are possible", *a.experts, most_recorded_experts));
  if (a.steps && *a.steps < 1) throw InputError(fmt::format("--steps {}: at least 1 is replayed", *a.steps));
  if (a.replicas < 0) throw InputError(fmt::format("--replicas {}: 0 or more", a.replicas));
  if (a.nodes < 1 || *a.ranks % a.nodes != 0)
    throw InputError(fmt::format("--nodes {}: every node has as many of the {} ranks", a.nodes, *a.ranks));
  if (a.calls < 1) throw InputError(fmt::format("--calls {}: at least 1 is needed", a.calls));
  if (a.measure && a.preset.empty())
    throw InputError("--measure runs a layer: give --preset NAME, with --hidden and --intermediate for a smaller one");
  if (!a.measure && (a.engine != "host" || a.gpus))
    throw InputError("--engine and --gpus say where --measure runs; give that, too");
  if (!a.preset.empty() || (a.hidden && a.intermediate)) return;
  const ReplayArguments usual;
  const std::pair<const char*, bool> of_a_layer[] = {{"--hidden", a.hidden.has_value()},
                                                     {"--intermediate", a.intermediate.has_value()},
                                                     {"--weights", !a.weights.empty()},
                                                     {"--wire", !a.wire.empty()},
                                                     {"--combine-wire", a.combine_wire != usual.combine_wire},
                                                     {"--machine", a.machine != usual.machine}};
  for (const auto& [flag, is_given] : of_a_layer) {
    if (is_given)
      throw InputError(fmt::format("{}: times need a layer: give --preset NAME, or both --hidden and --intermediate", flag));
  }
}

/// The experts of the layer: as typed, else the preset's where it has enough, else those that the recording names.
int experts_of(const ReplayArguments& a, int named) {
  if (a.experts) return *a.experts;
  if (a.preset.empty()) return named;
  const int preset = find_preset(a.preset).shape.experts;
  if (preset < named)
    throw InputError(fmt::format("the recording names {} experts, {} has {}; give --experts {}", named, a.preset, preset, named));
  return preset;
}

/// The layer that times are predicted for; nothing where no sizes were given.
std::optional<PlanRequest> request_of(const ReplayArguments& a, const replay::Source& source) {
  if (a.preset.empty() && !a.hidden) return std::nullopt;
  PlanRequest request;
  request.weights = WeightKind::bf16;
  if (!a.preset.empty()) {
    const ModelPreset& preset = find_preset(a.preset);
    request.shape = preset.shape;
    if (!preset.weights.empty()) request.weights = preset.weights.front();
  }
  if (!a.weights.empty()) request.weights = value_of(kinds, "--weights", a.weights);
  request.shape.hidden = a.hidden.value_or(request.shape.hidden);
  request.shape.intermediate = a.intermediate.value_or(request.shape.intermediate);
  request.shape.experts = source.experts;
  request.shape.topk = source.topk > 0 ? source.topk : 1;
  request.ranks = *a.ranks;
  request.tokens = request.cap = 1;
  const std::string usual = request.activation() == Activation::fp8 ? "fp8" : "bf16";
  request.wire = value_of(wires, "--wire", a.wire.empty() ? usual : a.wire);
  request.combine_wire = value_of(wires, "--combine-wire", a.combine_wire);
  request.machine = find_machine(a.machine);
  check_request(request);
  return request;
}

std::vector<int> layers_of(const ReplayArguments& a, int present) {
  std::vector<int> layers = a.layers;
  if (layers.empty()) {
    layers.resize(static_cast<std::size_t>(present));
    std::iota(layers.begin(), layers.end(), 0);
  }
  for (auto layer = layers.begin(); layer != layers.end(); ++layer) {
    if (*layer < 0 || *layer >= present)
      throw InputError(fmt::format("--layers {}: the recording has 0 to {}", *layer, present - 1));
    if (std::find(layers.begin(), layer, *layer) != layer) throw InputError(fmt::format("--layers {}: given twice", *layer));
  }
  return layers;
}

replay::ReplayOptions options_of(const ReplayArguments& a, const replay::Source& source) {
  replay::ReplayOptions options;
  options.ranks = *a.ranks;
  options.replicas = a.replicas;
  options.nodes = a.nodes;
  options.groups = a.groups;
  options.rule = value_of(copy_rules, "--copies", a.copies);
  options.layers = layers_of(a, source.layers);
  for (const std::string& word : a.ways) options.ways.push_back(real_way(word, "--way"));
  if (options.ways.empty()) options.ways.assign(real_ways.begin(), real_ways.end());
  options.request = request_of(a, source);
  return options;
}

void report(const ReplayReport& report) {
  if (!report.arguments.json.empty()) write_json(report.arguments.json, replay_json(report));
  print_replay(report);
}

void replay_loads(const ReplayArguments& a) {
  if (a.measure) throw InputError(fmt::format("{}: counts of experts cannot be run; --measure needs ids", a.recording));
  if (a.tokens || a.expand != 1)
    throw InputError(fmt::format("{}: counts of experts come in steps of their own; leave --tokens and --expand", a.recording));
  const ExpertLoads loads = read_expert_loads(a.recording);
  if (a.experts && *a.experts != loads.experts)
    throw InputError(fmt::format("--experts {}: {} counts {}", *a.experts, a.recording, loads.experts));
  if (a.topk && (*a.topk < 1 || *a.topk > loads.experts))
    throw InputError(fmt::format("--topk {}: 1 to {}, the experts of {}, are possible", *a.topk, loads.experts, a.recording));
  const int topk = a.topk.value_or(a.preset.empty() ? 0 : find_preset(a.preset).shape.topk);
  const replay::Source source = replay::source_of(loads, topk, a.steps);
  const replay::ReplayOptions options = options_of(a, source);
  ReplayReport all{a, source, options, replay::replay(source, options), {}, "counts of experts", loads.notes};
  all.notes.push_back("of counts alone: copies of tokens are not known, and sources are taken to be even");
  report(all);
}

void replay_ids(const ReplayArguments& a) {
  const Recording recording = Recording::open(a.recording, a.recorded_weights);
  if (a.topk && *a.topk != recording.topk())
    throw InputError(fmt::format("--topk {}: {} has {} choices a token", *a.topk, a.recording, recording.topk()));
  const int most = most_recorded_experts / recording.least_experts();
  if (a.expand < 1 || a.expand > most) throw InputError(fmt::format("--expand {}: 1 to {} are possible here", a.expand, most));
  const replay::Cut cut{*a.ranks, experts_of(a, recording.least_experts() * a.expand), a.tokens, a.steps, a.expand};
  const replay::Source source = replay::source_of(recording, cut);
  const replay::ReplayOptions options = options_of(a, source);
  const replay::ReplayResult result = replay::replay(source, options);
  const Measured measured = a.measure ? measure_replay(a, recording, cut, source, options, result) : Measured();
  ReplayReport all{a, source, options, result, measured, recording.prompts() > 0 ? "decode steps" : "prompt tokens", {}};
  if (recording.left_out() > 0)
    all.notes.push_back(fmt::format("{} tokens without any choice were left out", recording.left_out()));
  if (a.expand > 1) all.notes.push_back(fmt::format("ids expanded {} times", a.expand));
  if (cut.experts > recording.least_experts() * a.expand) {
    all.notes.push_back(
        fmt::format("the layer has {} experts, the recording names {}; --expand spreads them, --experts makes the layer smaller",
                    cut.experts, recording.least_experts() * a.expand));
  }
  report(all);
}

void add_layer(CLI::App& command, ReplayArguments& a) {
  const char* group = "Layer to predict and measure";
  auto* preset = command.add_option("--preset", a.preset, "a published model's layer (heddle plan --list)")->group(group);
  command.add_option("--hidden", a.hidden, "hidden size, or another than the preset's")->group(group)->check(whole_number);
  command.add_option("--intermediate", a.intermediate, "intermediate size, or another than the preset's")
      ->group(group)
      ->check(whole_number);
  command.add_option("--experts", a.experts, "experts (default: the preset's, else those that the recording names)")
      ->group(group)
      ->check(whole_number);
  command.add_option("--topk", a.topk, "of counts: choices a token (default: the preset's)")->group(group)->check(whole_number);
  command.add_option("--weights", a.weights, "bf16, fp8_block, mxfp4, nvfp4 or mxfp8 (default: the preset's first, else bf16)")
      ->group(group);
  command.add_option("--wire", a.wire, "bf16, fp8 or nvfp4 (default: what the weights ask for)")->group(group);
  command.add_option("--combine-wire", a.combine_wire, "likewise, for results")->group(group)->capture_default_str();
  command.add_option("--machine", a.machine, "machine to predict for (heddle plan --list)")->group(group)->capture_default_str();
  command.add_flag("--measure", a.measure, "run every layer and step, too")->group(group)->needs(preset);
  command.add_option("--engine", a.engine, "with --measure: host, or cuda")->group(group)->capture_default_str();
  command.add_option("--gpus", a.gpus, "with --engine cuda: ranks are spread over them (default: all, at most one a rank)")
      ->group(group)
      ->check(whole_number);
  command.add_option("--calls", a.calls, "measured calls of each, of which the median counts")
      ->group(group)
      ->check(whole_number)
      ->capture_default_str();
  command.add_option("--seed", a.seed, "of drawn weights and hidden states")
      ->group(group)
      ->check(seed_number)
      ->capture_default_str();
}

}  // namespace

void add_replay(CLI::App& app, int&) {
  const auto a = std::make_shared<ReplayArguments>();
  auto* command = app.add_subcommand("replay", "a recorded routing on ranks: load, imbalance, copies, times, better placements");
  command->add_option("recording", a->recording, ".npy, .npz, safetensors, vLLM's JSON; SGLang's counts (.pt)")->required();
  command->add_option("--recorded-weights", a->recorded_weights,
                      "routing weights of a .npy (default: looked for beside X.ids.npy)");
  command->add_option("--ranks", a->ranks, "ranks that share the experts")->check(whole_number);
  command
      ->add_option("--tokens", a->tokens,
                   "tokens of a step over all ranks (default: one of each prompt, or up to 4096 prompt tokens)")
      ->check(whole_number);
  command->add_option("--steps", a->steps, "at most so many steps (default: all)")->check(whole_number);
  command->add_option("--layers", a->layers, "layers of the recording (default: all)")->delimiter(',');
  command->add_option("--expand", a->expand, "spread each recorded expert over this many")
      ->check(whole_number)
      ->capture_default_str();
  command->add_option("--way", a->ways, "ways (default: all)")->delimiter(',');
  command->add_option("--replicas", a->replicas, "copies of busy experts beside one of each, for a second placement")
      ->check(whole_number)
      ->capture_default_str();
  command->add_option("--nodes", a->nodes, "nodes of as many ranks each: groups of experts, and their copies, stay on one")
      ->check(whole_number)
      ->capture_default_str();
  command->add_option("--groups", a->groups, "with --nodes: groups of experts (default: every expert is one)")->check(whole_number);
  command->add_option("--copies", a->copies, "how rows are shared out among copies: levelled or turns")->capture_default_str();
  command->add_option("--json", a->json, "all of it as one JSON object");
  add_layer(*command, *a);
  command->callback([a] {
    check_numbers(*a);
    if (!std::filesystem::exists(a->recording)) throw InputError(fmt::format("{}: no such file", a->recording));
    holds_loads(a->recording) ? replay_loads(*a) : replay_ids(*a);
  });
}

}  // namespace heddle::tool
