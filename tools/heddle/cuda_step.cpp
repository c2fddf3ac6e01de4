#include "cuda_step.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bench_kernels.hpp"
#include "bench_machine.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

/// Of a way whose host waits for counts a graph cannot be made.
constexpr const char* waits = "its host waits for counts in every layer, which a CUDA graph cannot hold";

Way way_of(const std::string& name) { return real_way(name, "--way"); }

}  // namespace

StepRun::StepRun(const StepArguments& a, const MegaArguments& layer, Lanes& lanes)
    : a_(a),
      layer_(layer),
      lanes_(lanes),
      layers_(layers_of(a)),
      shape_(mega_shape(layer, layer.presets.front(), value_of(fused_kinds, "--weights", layer.weights.front()), layer.ranks)) {}

std::vector<double> StepRun::replay(int gap, const std::function<void(int)>& layer, const std::function<void()>& check,
                                    int* kernels) {
  Replay step(lanes_, [&] {
    for (int i = 0; i < layers_; ++i) {
      for (std::size_t gpu = 0; gap > 0 && gpu < lanes_.gpus(); ++gpu) {
        const cuda::DeviceScope scope(lanes_.device(gpu));
        launch_pause(std::uint64_t{1000} * static_cast<std::uint64_t>(gap), lanes_.stream(gpu));
      }
      layer(i);
    }
  });
  if (kernels != nullptr) *kernels = step.kernels(0);
  return step.run(a_.replays, check, give_up_);
}

const std::vector<double>& StepRun::gaps_alone(int microseconds) {
  std::vector<double>& samples = gaps_[microseconds];
  if (!samples.empty()) return samples;
  if (microseconds == 0) {
    samples.assign(static_cast<std::size_t>(a_.replays), 0.0);
  } else {
    samples = replay(
        microseconds, [](int) {}, [] {}, nullptr);
  }
  return samples;
}

void StepRun::gap(MegaBed& bed, const Json& line, int microseconds) {
  int kernels = 0;
  const std::vector<double> steps = replay(
      microseconds, [&](int layer) { bed.queue(layer); }, [&] { bed.check(); }, &kernels);
  Json entry = step_entry(line, {steps, gaps_alone(microseconds)}, layers_);
  entry["distinct_layers"] = bed.copies();
  entry["kernels_a_layer"] = static_cast<double>(kernels) / layers_ - (microseconds > 0 ? 1 : 0);
  rows_.push_back(entry);
}

void StepRun::way(const std::string& name, Batch& batch, const LayerSource& source, const ExchangeMemory& memory, int tokens) {
  under_way_ = fmt::format("{}, {} tokens", name, tokens);
  const Json line = step_line(name, tokens, a_.gaps.front());
  attempt(rows_, line, fmt::format("{:>7} {:<12}", tokens, name), [&] {
    if (way_of(name) == Way::normal) throw InputError(waits);
    MegaBed bed(lanes_, batch, source, {way_of(name)}, tokens, memory, std::min(layers_, most_distinct_layers));
    batch.poison_outputs();
    bed.call(0, false, give_up_);
    if (const auto bad = batch.bad_outputs(tokens); bad > 0) {
      ++wrong_;
      throw InputError(fmt::format("{} outputs were not written or are not finite", bad));
    }
    for (const int gap : a_.gaps) this->gap(bed, step_line(name, tokens, gap), gap);
  });
}

void StepRun::size(const MegaShape& shape, const LayerSource& drawn, int tokens) {
  under_way_ = fmt::format("the batch of {} tokens", tokens);
  const BatchRouting routing = make_routing(routing_of(layer_, shape.shape), layer_.ranks, tokens);
  routing_note_ = routing.note;
  LayerSource source = drawn;
  source.shape.topk = routing.topk;  // a recording's own
  Batch batch(lanes_, routing, source.shape.hidden, layer_.seed);
  batch.set_tokens(tokens);
  std::vector<LayerWay> ways;
  for (const std::string& name : ways_of(a_)) ways.push_back({way_of(name)});
  const ExchangeMemory memory = memory_of(source, layer_.ranks, ways, tokens);
  for (const std::string& name : ways_of(a_)) way(name, batch, source, memory, tokens);
}

void StepRun::all(const std::function<void()>& save, const std::function<void()>& give_up) {
  give_up_ = give_up;
  const cuda::DeviceScope scope(lanes_.device(0));
  under_way_ = "drawing of weights";
  const DrawnLayer drawn(shape_, layer_.seed);
  print_line(fmt::format("{} on {}, {} of {} {} in one graph; us a step, median of {}", count_of(layer_.ranks, "rank"),
                         count_of(static_cast<std::int64_t>(lanes_.gpus()), "GPU"), count_of(layers_, "layer"), shape_.name,
                         word_of(kinds, shape_.kind), count_of(a_.replays, "replay")));
  print_step_title();
  for (const int tokens : a_.sizes) {
    size(shape_, drawn.source(), tokens);
    machine_ = machine_of(lanes_);  // now that GPUs are awake, for their clocks
    save();
  }
}

Json StepRun::json() const {
  Json json = result_head("step", a_.commit, machine_);
  json.update({{"ranks", layer_.ranks}, {"preset", shape_.name}});
  json.update(layer_json(shape_.shape, shape_.kind));
  json.update({{"routing", routing_note_}, {"layers", layers_}, {"graph", true}, {"rows", rows_}});
  return json;
}

Json step_on_gpus(const StepArguments& a, const SaveJson& save, int& status) {
  MegaArguments layer = mega_arguments(a.layer, "heddle bench step");
  layer.ways = {"none"};
  layer.tokens = a.sizes;
  check_arguments(layer);
  Lanes lanes(devices_for("step", layer.ranks, layer.gpus), std::chrono::milliseconds(layer.deadline_ms));
  StepRun run(a, layer, lanes);
  const Json json = run_and_save(run, lanes, save);
  if (run.wrong() > 0) status = 1;
  return json;
}

}  // namespace heddle::tool
