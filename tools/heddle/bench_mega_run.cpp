#include "bench_mega_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench_experts_kernels.hpp"
#include "bench_kernels.hpp"
#include "bench_machine.hpp"
#include "bench_mega_outputs.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "heddle/plan.hpp"
#include "reference/reference.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

/// Three times the L2 of an H200: what calls in turn must bring in for the first to find nothing left.
constexpr double evicting_bytes = 180e6;
/// A layer of which a call touches little would need many; its weights may be found in the L2, and the line says so.
constexpr int most_copies = 4;
/// Calls that are taken apart.
constexpr int timed_calls = 10;

LayerWay fused_way(const std::string& place) {
  return {Way::mega, place == "extra" ? SharedMode::extra : SharedMode::alone, place != "module"};
}

/// The fused layer with another combine than slots in bf16.
LayerWay combined_way(const std::string& combine) {
  LayerWay way{Way::mega};
  if (combine == "add") {
    way.combine = Combine::add;
  } else {
    way.combine_wire = wires.at(combine);
  }
  return way;
}

LayerWay full_ring_way() {
  LayerWay way{Way::mega};
  way.ring = RingSize::full;
  return way;
}

}  // namespace

double MegaRun::tensor_rate(WeightKind kind) const {
  return 1e15 * a_.tensor_pflops.value_or(kind == WeightKind::bf16 ? 0.79 : 1.4);
}

std::vector<LayerWay> MegaRun::ways() const {
  std::vector<LayerWay> all{{Way::low_latency}, {Way::mega}};  // whose outputs are compared
  for (const std::string& name : a_.ways) {
    if (name == "auto") {
      all.push_back(automatic());
    } else if (name != "none") {
      all.push_back({own_ways.at(name)});
    }
  }
  for (const std::string& place : a_.shared) all.push_back(fused_way(place));
  for (const std::string& combine : a_.combines) {
    if (combine != "slots") all.push_back(combined_way(combine));
  }
  if (a_.full_ring) all.push_back(full_ring_way());
  return all;
}

LayerWay MegaRun::automatic() const {
  LayerWay way{Way::automatic};
  if (!a_.tuning.empty()) way.table = std::make_shared<TuningTable>(TuningTable::read(a_.tuning));
  return way;
}

void MegaRun::begin(const Size& size, const std::string& what) {
  under_way_ = fmt::format("{} of {}, {} tokens, {}", word_of(kinds, size.layer.kind), size.layer.name, size.tokens, what);
}

std::vector<double> MegaRun::time(const Size& size, const Variant& variant, MegaBed& bed, Json& entry) {
  begin(size, variant.name + (bed.is_eager() ? " call by call" : " in a graph"));
  const int calls = calls_of(bed.copies());
  const auto work = [&] {
    for (int call = 0; call < calls; ++call) bed.queue(call);
  };
  const auto check = [&] { bed.check(); };
  const auto a_call = [calls](std::vector<double> samples) {
    for (double& sample : samples) sample /= calls;
    return samples;
  };
  if (bed.is_eager()) return a_call(time_queued(lanes_, work, a_.replays, check, give_up_));
  Replay replay(lanes_, work);
  const std::vector<double> samples = a_call(replay.run(a_.replays, check, give_up_));
  if (power_ == nullptr) return samples;
  begin(size, variant.name + " in a long loop");
  entry["sustained"] =
      power_->run(replay, {calls, static_cast<long long>(a_.ranks) * size.tokens, median(samples)}, check, give_up_);
  return samples;
}

void MegaRun::two_batches(const Size& size, const Variant& variant, std::unique_ptr<MegaBed> alone, Json& entry) {
  if (size.two == nullptr) return;
  TwoPlan plan{size.source, variant.way, size.memory, size.memory_of_both, size.copies, a_.batch_sms};
  plan.attention = attention_.get();
  plan.replays = a_.replays;
  plan.give_up = give_up_;
  plan.calls = [this](int copies) { return calls_of(copies); };
  plan.begin = [&](const std::string& what) { begin(size, variant.name + ", " + what); };
  entry["two_batches"] = size.two->compare(std::move(alone), plan);
  if (!two_wrong(entry["two_batches"]).empty()) ++wrong_;
}

void MegaRun::add_parts(MegaBed& bed, Json& entry) {
  std::vector<double> dispatch, experts, combine, shared, shares;
  for (int call = 0; call < timed_calls; ++call) {
    bed.call(call, true, give_up_);
    const MegaParts parts = bed.parts(call);
    dispatch.push_back(1e6 * parts.dispatch);
    experts.push_back(1e6 * parts.experts);
    combine.push_back(1e6 * parts.combine);
    shared.push_back(1e6 * parts.shared);
    shares.push_back((parts.dispatch + parts.combine) / (parts.dispatch + parts.experts + parts.combine));
  }
  entry["dispatch_us"] = median(dispatch);
  entry["experts_us"] = median(experts);
  entry["combine_us"] = median(combine);
  if (!entry["shared"].is_null()) entry["shared_us"] = median(shared);
  entry["communication_share"] = median(shares);
}

std::vector<std::vector<bf16>> MegaRun::right(Size& size, const Variant& variant, Json& entry, const char* when) {
  const auto values = static_cast<std::size_t>(size.tokens) * static_cast<std::size_t>(size.batch.hidden());
  std::string what;
  std::vector<std::vector<bf16>> outputs;
  if (const unsigned long long bad = size.batch.bad_outputs(size.tokens); bad > 0) {
    what = fmt::format("{} of {} outputs were not written or are not finite", bad, values * static_cast<std::size_t>(a_.ranks));
  } else {
    outputs = outputs_of(size.batch, size.tokens);
    const bool is_slots =
        entry.value("chosen", "") == heddle::name(Way::mega) || entry.value("chosen", "") == heddle::name(Way::low_latency);
    if (!(variant.is_fused() || is_slots) || size.expected.empty()) return outputs;
    if (!size.unquantised.empty()) entry["error_of_slots"] = relative_error(outputs, size.unquantised);
    if (variant.way.combine == Combine::add && entry["error_of_slots"].get<double>() <= error_of_additions(size.source.shape.topk))
      return outputs;
    const std::size_t off = different(outputs, size.expected);
    entry["equals_low_latency"] = off == 0;
    if (off == 0) return outputs;
    what = fmt::format("{} of {} outputs have other bits than low_latency's", off, values * static_cast<std::size_t>(a_.ranks));
  }
  what += when;
  print_line(fmt::format("{} wrong: {}", label_of(size, variant.name), what));
  entry["wrong"] = what;
  rows_.push_back(entry);
  ++wrong_;
  return {};
}

void MegaRun::measure(Size& size, const Variant& variant, Json& entry) {
  const std::string& name = variant.name;
  begin(size, "the making of " + name);
  auto bed = std::make_unique<MegaBed>(lanes_, size.batch, size.source, variant.way, size.tokens, size.memory, size.copies);
  begin(size, "the first call of " + name);
  if (variant.is_fused()) ++fused_;
  size.batch.poison_outputs();
  bed->call(0, false, give_up_);
  if (variant.is_auto()) entry["chosen"] = heddle::name(bed->way());
  const auto outputs = right(size, variant, entry, "");
  if (outputs.empty()) return;
  if (variant.way.way == Way::low_latency) size.expected = outputs;
  add_copies(size, bed->copies(), entry);
  entry["graph"] = !bed->is_eager();
  size.batch.poison_outputs();
  const std::vector<double> samples = time(size, variant, *bed, entry);
  if (right(size, variant, entry, bed->is_eager() ? ", in timed calls" : ", in a graph").empty()) return;
  begin(size, "the parts of " + name);
  if (!variant.is_fused()) add_parts(*bed, entry);
  two_batches(size, variant, std::move(bed), entry);
  report(size, name, entry, samples);
  add_lines(size, variant, entry);
}

/// As many bytes as the weights of a call, brought in by bulk copies on one GPU.
void MegaRun::stream(Size& size) {
  const std::string name = "stream";
  const Json fresh = entry_of(size, name);
  attempt(rows_, fresh, label_of(size, name), [&] {
    Json entry = fresh;
    begin(size, "the stream of weights");
    const int touched = std::max(1, size.load.touched);
    const auto pieces = static_cast<std::size_t>(std::ceil(size.load.weight_bytes / touched / stream_piece));
    sm90::OrderedMatrix weights;
    weights.expert_stride = std::max<std::size_t>(pieces, 1) * stream_piece;
    const int experts = touched * size.copies;
    const Block memory(lanes_.device(0), static_cast<std::size_t>(experts) * weights.expert_stride);
    fill_normal(memory.as<bf16>(), memory.bytes() / sizeof(bf16), a_.seed, lanes_.stream(0));
    lanes_.settle(give_up_);
    weights.chunks = memory.as<std::byte>();
    const int calls = calls_of(size.copies);
    Replay replay(lanes_, [&] {
      for (int call = 0; call < calls; ++call)
        launch_stream(weights, experts, call % size.copies * touched, touched, lanes_.sms(), lanes_.stream(0));
    });
    std::vector<double> samples = replay.run(
        a_.replays, [] {}, give_up_);
    for (double& sample : samples) sample /= calls;
    size.stream_us = median(samples);
    add_copies(size, size.copies, entry);
    report(size, name, entry, samples);
  });
}

void MegaRun::add_copies(const Size& size, int copies, Json& entry) const {
  entry["layer_copies"] = copies;
  entry["weights_hot"] = copies * size.load.weight_bytes < evicting_bytes;
  entry["calls"] = calls_of(copies);
}

void MegaRun::way(Size& size, const Variant& variant) {
  Json fresh = entry_of(size, variant.is_fused() ? "mega" : variant.name);
  if (!variant.place.empty()) fresh["shared_place"] = variant.place;
  if (variant.is_fused()) {
    const ExchangeMemory memory = memory_of(size.source, a_.ranks, {variant.way}, size.tokens);
    fresh["combine"] = variant.combine;
    fresh["ring"] = word_of(ring_sizes, variant.way.ring);
    fresh["buffer_bytes"] = memory.dispatch + memory.combine + memory.mega_words + memory.mega_sums;
  }
  attempt(rows_, fresh, label_of(size, variant.name), [&] {
    Json entry = fresh;
    try {
      measure(size, variant, entry);
    } catch (const InputError& error) {
      if (variant.is_fused()) refusal_ = error.what();
      throw;
    }
  });
}

/// Outputs to compare with, where low_latency is not among the chains that are timed.
void MegaRun::reference(Size& size, const LayerWay& way) {
  const std::string name = "low_latency";
  const Json fresh = entry_of(size, name);
  attempt(rows_, fresh, label_of(size, name), [&] {
    Json entry = fresh;
    begin(size, "the outputs of " + name);
    const Variant variant{name, "", way};
    MegaBed bed(lanes_, size.batch, size.source, variant.way, size.tokens, size.memory, 1);
    size.batch.poison_outputs();
    bed.call(0, false, give_up_);
    size.expected = right(size, variant, entry, "");
  });
}

void MegaRun::chain(Size& size, const std::string& name, const LayerWay& what) {
  const Variant variant{name, "", what};
  way(size, variant);
}

/// place: of the shared expert; empty: as the layer has it, with one inside or without.
void MegaRun::fused(Size& size, const std::string& place) {
  const bool plain = a_.shared.size() <= 1 && place != "module" && place != "extra";
  way(size, {plain ? "mega" : "mega " + place, place, fused_way(place)});
}

/// The same layer without its shared expert, on the same heap.
void MegaRun::without_shared(const Size& size) {
  MegaShape shape = size.layer;
  shape.shared_kind.reset();
  LayerSource source = size.source;
  source.shared.reset();
  Size bare{shape, source, size.batch, size.tokens, size.memory, load_of(shape, size.batch), size.routing};
  bare.floor_us = floor_of(bare);
  bare.copies = size.copies;
  bare.two = size.two;
  bare.memory_of_both = size.memory_of_both;
  bare.inside_us = size.inside_us;
  reference(bare);
  fused(bare, "none");
}

/// With the bits of low_latency with the same wire; results that are added have some order's.
void MegaRun::combined(const Size& size, const std::string& combine) {
  Size other = size;
  other.unquantised = size.expected;
  const LayerWay fused = combined_way(combine);
  LayerWay chain = fused;
  chain.way = Way::low_latency;
  if (combine != "add") reference(other, chain);
  way(other, {"mega " + combine, "", fused, combine});
}

double MegaRun::floor_of(const Size& size) const {
  return 1e6 * std::max(size.load.weight_bytes / (1e12 * a_.stream_tbps), size.load.operations / tensor_rate(size.layer.kind));
}

void MegaRun::size(const MegaShape& shape, const LayerSource& drawn, int tokens) {
  under_way_ = fmt::format("the batch of {} tokens", tokens);
  const BatchRouting routing = make_routing(routing_of(a_, shape.shape), a_.ranks, tokens);
  LayerSource source = drawn;
  source.shape.topk = routing.topk;  // a recording's own
  // A workspace for this size alone: the areas of another size lie elsewhere, and some words where nothing else may have lain.
  Batch batch(lanes_, routing, source.shape.hidden, a_.seed);
  batch.set_tokens(tokens);
  Size size{shape, source, batch, tokens, memory_of(source, a_.ranks, ways(), tokens), load_of(shape, batch), routing.note};
  size.floor_us = floor_of(size);
  size.copies = std::clamp(static_cast<int>(std::ceil(evicting_bytes / std::max(size.load.weight_bytes, 1.0))), 1, most_copies);
  std::unique_ptr<TwoBatches> two;
  if (a_.batches == 2) {
    two = std::make_unique<TwoBatches>(lanes_, batch, make_routing(routing_of(a_, shape.shape), a_.ranks, 2 * tokens), tokens,
                                       a_.seed);
    size.two = two.get();
    size.memory_of_both = memory_of(source, a_.ranks, ways(), 2 * tokens);
  }
  stream(size);
  if (!awake_) machine_ = machine_of(lanes_);  // once GPUs are awake, for their clocks
  awake_ = true;
  if (a_.attention && attention_ == nullptr) {
    under_way_ = "the stand-in for attention";
    attention_ = std::make_unique<AttentionStandIn>(lanes_, *a_.attention, give_up_);
    print_line(fmt::format("attention: work of {} us on all SMs, alone {:.2f} us", *a_.attention,
                           attention_->json()["alone"]["median_us"].get<double>()));
  }
  for (const std::string& name : a_.ways) {
    if (name != "none" && name != "auto") chain(size, name, {own_ways.at(name)});
  }
  if (std::find(a_.ways.begin(), a_.ways.end(), "low_latency") == a_.ways.end()) reference(size);
  if (!shape.shared_kind) fused(size, "");
  for (const std::string& place : a_.shared) place == "none" ? without_shared(size) : fused(size, place);
  if (std::find(a_.ways.begin(), a_.ways.end(), "auto") != a_.ways.end()) chain(size, "auto", automatic());
  for (const std::string& combine : a_.combines) {
    if (combine != "slots") combined(size, combine);
  }
  if (a_.full_ring) way(size, {"mega full", "", full_ring_way()});
}

void MegaRun::layer(const MegaShape& shape) {
  const std::string kind = word_of(kinds, shape.kind);
  under_way_ = fmt::format("drawing of {} weights", kind);
  const DrawnLayer drawn(shape, a_.seed);
  const std::string shared = shape.shared_kind ? ", shared expert in " + word_of(kinds, *shape.shared_kind) : "";
  const std::string choices = a_.trace.empty() ? fmt::format("top-{}", shape.shape.topk) : "choices as recorded";
  print_line(fmt::format("\n{} {}: hidden {}, intermediate {}, {} experts of {:.2f} MB, {}{}", shape.name, kind, shape.shape.hidden,
                         shape.shape.intermediate, shape.shape.experts,
                         static_cast<double>(expert_weight_bytes(shape.shape, shape.kind).total()) / 1e6, choices, shared));
  print_line(fmt::format("{:>6} {:<12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>8} {:>9} {:>9} {:>6}", "tokens", "way",
                         "median", "least", "most", "dispatch", "experts", "combine", "moves", "touched", "MB", "floor", "times"));
  for (const int tokens : a_.tokens) {
    size(shape, drawn.source(), tokens);
    save_();
  }
}

void MegaRun::all(const std::function<void()>& save, const std::function<void()>& give_up) {
  save_ = save;
  give_up_ = give_up;
  machine_ = machine_of(lanes_);
  const cuda::DeviceScope scope(lanes_.device(0));
  prepare_streams();
  if (a_.power) power_ = std::make_unique<PowerLoops>(lanes_, a_.seconds.value_or(5));
  if (power_ != nullptr && !power_->missing().empty())
    print_line(fmt::format("power is not known, sustained times are taken all the same: {}", power_->missing()));
  print_line(fmt::format("{} ranks on {} GPUs, routing {}; us a call of the layer, median of {} replays of {} calls or more",
                         a_.ranks, lanes_.gpus(), a_.trace.empty() ? a_.routing : a_.trace, a_.replays, a_.calls));
  print_line("dispatch, experts, combine and the share of what moves rows, dispatch and combine: of calls that are not captured");
  print_line(
      fmt::format("floor: weights at {} TB/s or operations at {} PFLOP/s (bf16: {}), whichever takes longer; stream: as many "
                  "bytes brought in and nothing else",
                  a_.stream_tbps, tensor_rate(WeightKind::mxfp4) / 1e15, tensor_rate(WeightKind::bf16) / 1e15));
  for (const std::string& preset : a_.presets) {
    for (const std::string& kind : a_.weights) layer(mega_shape(a_, preset, value_of(fused_kinds, "--weights", kind), a_.ranks));
  }
  if (wrong_ > 0) print_line(fmt::format("\n{} of the results were wrong", wrong_));
  if (fused_ == 0) throw InputError(refusal_.empty() ? "the fused layer was not measured: see above" : refusal_);
}

}  // namespace heddle::tool
