// Measured times of a replay: every layer and step by every way, on the host engine or on GPUs.
#include <fmt/format.h>

#include <algorithm>

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

double median_seconds(const Inputs& inputs, const LayerOptions& options, int calls) {
  std::vector<double> seconds;
  for (int call = 0; call < calls; ++call) seconds.push_back(run_job(inputs, options, {nullptr, 1}).seconds);
  return median(seconds);
}

}  // namespace

Measured measure_replay(const ReplayArguments& a, const Recording& recording, const replay::Cut& cut, const replay::Source& source,
                        const replay::ReplayOptions& options) {
  Inputs inputs = load_inputs(layer_of(a, source.experts, source.tokens));
  inputs.source.shape.topk = source.topk;
  Measured measured;
  for (const Way way : options.ways) {
    LayerOptions layer_options = inputs.options;
    layer_options.way = way;
    MeasuredWay& times = measured[way];
    for (const int layer : options.layers) {
      for (int step = 0; step < source.steps; ++step) {
        inputs.routing = replay::take_step(recording, cut, source.tokens, layer, step);
        take_hidden_states(inputs, recording, step, source.tokens);
        times.layers[layer] += median_seconds(inputs, layer_options, a.calls) / source.steps;
      }
      times.step += times.layers[layer];
    }
  }
  return measured;
}

}  // namespace heddle::tool
