// The flags of heddle bench step, and what its lines and entries say.
#include "step.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "command.hpp"
#include "drawn_layer.hpp"
#include "gpu_job.hpp"
#include "heddle/error.hpp"
#include "provenance.hpp"

namespace heddle::tool {

using Json = nlohmann::ordered_json;

void add_step_flags(CLI::App& command, StepArguments& a) {
  add_layer_arguments(command, a.layer);
  const char* step = "Step";
  command.add_option("--layers", a.layers, "layers of a step (default: the preset's)")->group(step)->check(whole_number);
  command.add_option("--gaps", a.gaps, "microseconds a layer that stand for attention (default: 0,50,100,200)")
      ->delimiter(',')
      ->group(step);
  command.add_option("--sizes", a.sizes, "tokens a rank (default: 64)")->delimiter(',')->group(step);
  command.add_option("--way", a.ways, "ways to measure (default: all that the engine can put into a step)")
      ->delimiter(',')
      ->group(step);
  command.add_option("--replays", a.replays, "steps that are timed")->group(step)->capture_default_str()->check(whole_number);
  command.add_option("--commit", a.commit, "what the JSON says was measured")->group(step);
  command.add_option("--json", a.json, "raw samples with their provenance")->group(step);
}

void check_arguments(const StepArguments& a) {
  if (!a.layer.batch.empty() || a.layer.tokens)
    throw InputError(
        "heddle bench step draws batches of its own: give --sizes, the tokens of a rank, instead of --batch or --tokens");
  if (a.layer.processes || a.layer.tensor_parallel)
    throw InputError(
        "heddle bench step has ranks as threads that each bring their own tokens; leave --processes and --tensor-parallel");
  if (!a.layer.ranks) throw InputError("give --ranks N");
  if (a.sizes.empty() || *std::min_element(a.sizes.begin(), a.sizes.end()) < 1)
    throw InputError("--sizes: a rank brings 1 token or more");
  constexpr int most_tokens = 1 << 20;
  if (const int largest = *std::max_element(a.sizes.begin(), a.sizes.end()); largest > most_tokens)
    throw InputError(fmt::format("--sizes {}: at most {} tokens a rank", largest, most_tokens));
  if (a.gaps.empty() || *std::min_element(a.gaps.begin(), a.gaps.end()) < 0)
    throw InputError("--gaps: 0 microseconds or more a layer");
  if (a.replays < 1) throw InputError(fmt::format("--replays {}: at least 1 is needed", a.replays));
  if (layers_of(a) < 1) throw InputError(fmt::format("--layers {}: at least 1 is needed", layers_of(a)));
  for (const std::string& way : a.ways) real_way(way, "--way");
  if (a.layer.engine != "cuda") return;
  check_usual_ways(a.layer, "heddle bench step --engine cuda");
  check_drawn_layer(a.layer, "heddle bench step");
}

int layers_of(const StepArguments& a) {
  if (a.layers) return *a.layers;
  if (a.layer.preset.empty()) throw InputError("give --layers N, how many layers a step has");
  const ModelPreset& preset = find_preset(a.layer.preset);
  if (!preset.layers) throw InputError(fmt::format("the layers of {} are not confirmed; give --layers N", preset.name));
  return *preset.layers;
}

std::vector<std::string> ways_of(const StepArguments& a) {
  if (!a.ways.empty()) return a.ways;
  return {"gather", "normal", "low_latency", "elastic", "one_sided", "mega"};
}

Json step_line(const std::string& way, int tokens, int gap) { return {{"way", way}, {"tokens", tokens}, {"gap_us", gap}}; }

void print_step_title() {
  print_line(fmt::format("{:>7} {:<12} {:>7} {:>11} {:>11} {:>11} {:>11} {:>7}", "tokens", "way", "gap us", "step us", "gaps us",
                         "MoE us", "a layer", "share"));
}

Json step_entry(const Json& line, const StepSamples& samples, int layers) {
  Json entry = line;
  entry.update(summary(samples.steps));
  const double step = median(samples.steps), gaps = median(samples.gaps), moe = step - gaps;
  entry["gaps_us"] = gaps;
  entry["gaps_samples_us"] = samples.gaps;
  entry["moe_us"] = moe;
  entry["moe_us_a_layer"] = moe / layers;
  entry["moe_share"] = moe / step;
  print_line(fmt::format("{:>7} {:<12} {:>7} {:>11.1f} {:>11.1f} {:>11.1f} {:>11.2f} {:>6.1f}%", entry["tokens"].get<int>(),
                         entry["way"].get<std::string>(), entry["gap_us"].get<int>(), step, gaps, moe, moe / layers,
                         100 * moe / step));
  return entry;
}

#ifndef HEDDLE_CUDA
Json step_on_gpus(const StepArguments&, const SaveJson&, int&) { refuse_without_cuda("--engine cuda", ", or take --engine host"); }
#endif

Json measure_step(const StepArguments& a, const SaveJson& save, int& status) {
  check_arguments(a);
  return a.layer.engine == "cuda" ? step_on_gpus(a, save, status) : step_on_host(a, save);
}

}  // namespace heddle::tool
