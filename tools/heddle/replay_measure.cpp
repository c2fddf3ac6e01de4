// Measured times of a replay: every layer and step by every way, on the host engine or on GPUs.
#include <fmt/format.h>

#include <algorithm>

#include "heddle/balancing.hpp"
#include "heddle/error.hpp"
#include "job.hpp"
#include "provenance.hpp"
#include "replay.hpp"

namespace heddle::tool {

namespace {

LayerArguments layer_of(const ReplayArguments& a, int experts, int tokens) {
  LayerArguments layer;
  layer.preset = a.preset;
  layer.weights = a.weights;
  layer.hidden = a.hidden;
  layer.intermediate = a.intermediate;
  layer.experts = experts;
  layer.ranks = a.ranks;
  layer.engine = a.engine;
  layer.gpus = a.gpus;
  layer.tokens = tokens;
  layer.wire = a.wire;
  layer.combine_wire = a.combine_wire == "bf16" ? "" : a.combine_wire;
  layer.routing = "uniform";  // replaced step by step
  layer.seed = a.seed;
  return layer;
}

/// Recorded hidden states of a step's tokens, where they are of the layer's size.
void take_hidden_states(Inputs& inputs, const Recording& recording, int step, int tokens) {
  if (recording.hidden() == 0) return;
  const int hidden = inputs.source.shape.hidden;
  if (recording.hidden() != hidden) {
    throw InputError(fmt::format("the recording's hidden states have {} values a token, the layer {}; give --hidden {}",
                                 recording.hidden(), hidden, recording.hidden()));
  }
  const auto values = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(hidden);
  std::copy_n(recording.hidden_states().begin() + static_cast<std::ptrdiff_t>(values) * step, values, inputs.hidden_states.begin());
}

/// The median time of so many calls, and the pairs of each rank, which are the same in all of them.
struct MeasuredStep {
  double seconds = 0;
  std::vector<double> pairs;
};

MeasuredStep measure_step(const Inputs& inputs, const LayerOptions& options, int calls) {
  MeasuredStep step;
  std::vector<double> seconds;
  for (int call = 0; call < calls; ++call) {
    const JobResult result = run_job(inputs, options, {nullptr, 1});
    seconds.push_back(result.seconds);
    step.pairs.clear();
    for (const LayerReport& report : result.reports) step.pairs.push_back(static_cast<double>(report.rows_real));
  }
  step.seconds = median(seconds);
  return step;
}

/// Everything under one placement.
class PlacementRun {
 public:
  PlacementRun(const ReplayArguments& a, const Recording& recording, const replay::Cut& cut, const replay::Source& source,
               const replay::ReplayOptions& options)
      : a_(a),
        recording_(recording),
        cut_(cut),
        source_(source),
        options_(options),
        inputs_(load_inputs(layer_of(a, source.experts, source.tokens))) {
    inputs_.source.shape.topk = source.topk;
    logical_ = inputs_.source;
  }

  MeasuredPlacement run(const replay::PlacementReplay& placement) {
    MeasuredPlacement measured{placement.replicas, {}};
    for (const Way way : options_.ways) {
      MeasuredWay& times = measured.ways[way];
      for (std::size_t i = 0; i < options_.layers.size(); ++i) {
        if (placement.replicas > 0) inputs_.source = physical_source(logical_, placement.maps[i]);
        run_layer(way, options_.layers[i], placement.replicas > 0 ? &placement.maps[i] : nullptr, times);
      }
      times.max_over_mean /= static_cast<double>(options_.layers.size());
    }
    return measured;
  }

 private:
  /// map: null for the contiguous placement of the experts as they are.
  void run_layer(Way way, int layer, const ReplicaMap* map, MeasuredWay& times) {
    LayerOptions layer_options = inputs_.options;
    layer_options.way = way;
    for (int step = 0; step < source_.steps; ++step) {
      inputs_.routing = replay::take_step(recording_, cut_, source_.tokens, layer, step);
      if (map != nullptr) inputs_.routing = choose_copies(*map, options_.rule, inputs_.routing, inputs_.tokens_per_rank);
      take_hidden_states(inputs_, recording_, step, source_.tokens);
      const MeasuredStep measured = measure_step(inputs_, layer_options, a_.calls);
      times.layers[layer] += measured.seconds / source_.steps;
      times.max_over_mean += max_over_mean(measured.pairs) / source_.steps;
    }
    times.step += times.layers[layer];
  }

  const ReplayArguments& a_;
  const Recording& recording_;
  const replay::Cut& cut_;
  const replay::Source& source_;
  const replay::ReplayOptions& options_;
  Inputs inputs_;
  LayerSource logical_;
};

}  // namespace

Measured measure_replay(const ReplayArguments& a, const Recording& recording, const replay::Cut& cut, const replay::Source& source,
                        const replay::ReplayOptions& options, const replay::ReplayResult& result) {
  if (options.replicas > 0 && (source.experts + options.replicas) % options.ranks != 0) {
    throw InputError(
        fmt::format("--replicas {}: {} experts and as many more are not the same number on each of {} ranks, which a run "
                    "needs; {} are",
                    options.replicas, source.experts, options.ranks,
                    options.replicas + options.ranks - (source.experts + options.replicas) % options.ranks));
  }
  PlacementRun run(a, recording, cut, source, options);
  Measured measured{run.run(result.placements.front())};
  if (options.replicas > 0) measured.push_back(run.run(result.placements.back()));
  return measured;
}

}  // namespace heddle::tool
