// heddle bench step on the host engine: a plain loop over the layers, ranks as threads, which sleep in the gaps.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "host_calls.hpp"
#include "provenance.hpp"
#include "step.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

/// Of every step the slowest rank's time.
class Slowest {
 public:
  explicit Slowest(int steps) : us_(static_cast<std::size_t>(steps), 0.0) {}
  void add(int step, double us) {
    const std::lock_guard lock(mutex_);
    double& slowest = us_[static_cast<std::size_t>(step)];
    slowest = std::max(slowest, us);
  }
  const std::vector<double>& us() const { return us_; }

 private:
  std::mutex mutex_;
  std::vector<double> us_;
};

/// `replays` steps of this rank, after one that warms up: in each, `layers` times a gap and what follows it.
void run_steps(HostRank& rank, int replays, int layers, int gap, Slowest& slowest, const std::function<void(int)>& layer) {
  for (int step = -1; step < replays; ++step) {
    rank.meet();
    const auto begin = Clock::now();
    for (int i = 0; i < layers; ++i) {
      if (gap > 0) std::this_thread::sleep_for(std::chrono::microseconds(gap));
      layer(i);
    }
    if (step >= 0) slowest.add(step, std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
}

StepSamples measure(const Inputs& inputs, const LayerOptions& options, const StepArguments& a, int tokens, int gap) {
  const int layers = layers_of(a);
  Slowest steps(a.replays), gaps(a.replays);
  on_host_ranks(inputs, options, std::min(layers, most_distinct_layers), [&](HostRank& rank) {
    run_steps(rank, a.replays, layers, gap, steps, [&](int layer) { rank.call(layer, tokens); });
    run_steps(rank, a.replays, layers, gap, gaps, [](int) {});
  });
  return {steps.us(), gaps.us()};
}

Json report_of(const StepArguments& a, const Inputs& inputs, const Json& rows) {
  Json json = result_head("step", a.commit, host_machine_json());
  json["ranks"] = inputs.ranks;
  json.update(layer_json(inputs.source.shape, inputs.source.kind));
  json.update({{"layers", layers_of(a)},
               {"distinct_layers", std::min(layers_of(a), most_distinct_layers)},
               {"graph", false},
               {"rows", rows}});
  return json;
}

}  // namespace

Json step_on_host(const StepArguments& a, const SaveJson& save) {
  LayerArguments layer = a.layer;
  layer.tokens = *layer.ranks * *std::max_element(a.sizes.begin(), a.sizes.end());
  if (layer.trace.empty() && layer.routing.empty()) layer.routing = "uniform";
  Inputs inputs = load_inputs(layer);
  inputs.source.shared.reset();  // as on GPUs
  print_line(fmt::format("{} (threads), {} of {} x {}, {}; us a step, median of {}; threads sleep in the gaps",
                         count_of(inputs.ranks, "rank"), count_of(layers_of(a), "layer"), inputs.source.shape.hidden,
                         inputs.source.shape.intermediate, count_of(inputs.source.shape.experts, "expert"), a.replays));
  print_step_title();
  Json rows = Json::array();
  for (const int tokens : a.sizes) {
    for (const std::string& way : ways_of(a)) {
      const LayerOptions options = options_of_way(way, layer, inputs);
      for (const int gap : a.gaps) {
        rows.push_back(step_entry(step_line(way, tokens, gap), measure(inputs, options, a, tokens, gap), layers_of(a)));
        save(report_of(a, inputs, rows));
      }
    }
  }
  return report_of(a, inputs, rows);
}

}  // namespace heddle::tool
