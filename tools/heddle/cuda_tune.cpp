// heddle tune --engine cuda: a run of `heddle bench mega`, whose medians become the table.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "bench_machine.hpp"
#include "bench_mega.hpp"
#include "bench_mega_run.hpp"
#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "tune.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

MegaArguments bench_arguments(const TuneArguments& a) {
  const LayerArguments& layer = a.layer;
  if (layer.preset.empty())
    throw InputError(
        "heddle tune --engine cuda draws weights: give --preset NAME, and --hidden, --intermediate, --experts or --topk");
  const ModelPreset& preset = find_preset(layer.preset);
  MegaArguments bench;
  bench.presets = {layer.preset};
  if (layer.weights.empty() && preset.weights.empty())
    throw InputError(fmt::format("the weight format of {} is not confirmed; give --weights", preset.name));
  bench.weights = {layer.weights.empty() ? word_of(kinds, preset.weights.front()) : layer.weights};
  bench.hidden = layer.hidden;
  bench.intermediate = layer.intermediate;
  bench.experts = layer.experts;
  bench.topk = layer.topk;
  bench.seed = layer.seed;
  bench.ranks = layer.ranks.value_or(0);
  bench.gpus = layer.gpus.value_or(0);
  bench.deadline_ms = layer.deadline_ms;
  bench.replays = a.calls;
  bench.tokens = a.sizes.empty() ? std::vector{1, 8, 64, 128, 512, 4096} : a.sizes;
  if (!layer.routing.empty()) bench.routing = layer.routing;
  bench.trace = layer.trace;
  bench.trace_layer = layer.trace_layer;
  bench.trace_step = layer.trace_step;
  bench.trace_expand = layer.trace_expand;
  if (a.ways.empty()) return bench;
  bench.ways.clear();
  for (const std::string& way : a.ways) {
    if (way != "mega") bench.ways.push_back(way);  // it is always measured
  }
  if (bench.ways.empty()) bench.ways = {"none"};
  return bench;
}

}  // namespace

std::vector<TuningEntry> tune_on_gpus(const TuneArguments& a) {
  MegaArguments bench = bench_arguments(a);
  check_arguments(bench);
  Lanes lanes(devices_for("mega", bench.ranks, bench.gpus), std::chrono::milliseconds(bench.deadline_ms));
  MegaRun run(bench, lanes);
  run_and_save(run, lanes, "");
  if (run.wrong() > 0) throw Error(ErrorKind::check, "heddle tune: some results were wrong, see above; nothing is written");
  return entries_of_bench(run.json(), "this run");
}

}  // namespace heddle::tool
