#include "cuda_balance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "bench_machine.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Clock = std::chrono::steady_clock;

/// Calls of one load before it is given up.
constexpr std::size_t most_calls = 20'000;

// Where the marks of a load's calls are, numbered from 0.
std::size_t mark_before(std::size_t call) { return 2 * call; }
std::size_t mark_behind(std::size_t call) { return 2 * call + 1; }

LayerOptions options_of(Way way, int tokens) {
  LayerOptions options;
  options.way = way;
  options.cap = tokens;
  return options;
}

ReplicaMap first_placement(const LayerShape& shape, int ranks, int extra) {
  return balance_experts(std::vector<double>(static_cast<std::size_t>(shape.experts), 1.0), {ranks, extra, 1, {}});
}

}  // namespace

BalanceBed::BalanceBed(Lanes& lanes, Batch& batch, const LayerSource& source, const BalanceArguments& a, Way way, int tokens)
    : lanes_(lanes), step_{tokens, Phase::decode}, every_(a.calls) {
  const LayerOptions options = options_of(way, tokens);
  const ReplicaMap first = first_placement(source.shape, batch.ranks(), extra_of(a));
  const LayerSource physical = physical_source(source, first);
  const ContextLayer context{&physical, first.placement(), options};
  const ContextPlan plan = plan_context({&context, 1});
  DeviceWorkspace& workspace = batch.workspace(plan.heap_bytes);
  BalancingOptions balancing;
  balancing.every = a.calls;
  balancing.copy_bytes = static_cast<std::size_t>(a.copy_mb) << 20;
  DeviceBalancingOptions ahead;
  ahead.calls_ahead = a.calls_ahead;
  ahead.staged_experts = a.staged;
  layer_ = std::make_unique<DeviceBalancedLayer>(workspace, plan.memory, source, first, options, balancing, ahead);
  for (std::size_t gpu = 0; gpu < lanes.gpus(); ++gpu) {
    streams_.push_back(lanes.stream(gpu));
    inputs_.emplace_back();
    outputs_.emplace_back();
    for (int local = 0; local < workspace.ranks_on(gpu); ++local) {
      inputs_.back().push_back(batch.input(workspace.first_rank(gpu) + local));
      outputs_.back().push_back(batch.output(workspace.first_rank(gpu) + local).out);
    }
  }
  if (way != Way::normal) graphs_ = captured_graphs(lanes, [this] { queue(); });
}

BalanceBed::~BalanceBed() { layer_->close(); }

/// Begun on all GPUs before it ends on one, as a call must in which the host waits.
void BalanceBed::queue() {
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) layer_->begin(gpu, inputs_[gpu], step_, streams_[gpu]);
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) layer_->end(gpu, outputs_[gpu], streams_[gpu]);
}

void BalanceBed::launch() {
  if (graphs_.empty()) {
    queue();
    return;
  }
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
    const cuda::DeviceScope scope(lanes_.device(gpu));
    cuda::check(cudaGraphLaunch(graphs_[gpu].get(), streams_[gpu]), "replay of a call");
  }
}

void BalanceBed::call() {
  launch();
  layer_->follow(streams_);
}

BalanceCall BalanceBed::call(Marks& marks) {
  marks.mark_all();
  launch();
  marks.mark_all();
  const auto since = Clock::now();
  layer_->follow(streams_);
  BalanceCall call;
  call.follow_us = 1e6 * std::chrono::duration<double>(Clock::now() - since).count();
  call.is_moving = layer_->is_moving();
  call.switches = layer_->report().switches;
  call.looks = layer_->report().looks;
  return call;
}

std::vector<BalanceCall> BalanceBed::calls_of_a_load(Marks& marks, int behind) {
  std::vector<BalanceCall> calls;
  const std::int64_t switches = layer_->report().switches, looks = layer_->report().looks;
  std::int64_t looks_at_switch = looks;
  int calls_behind = 0;
  const auto is_done = [&] {
    if (calls.size() >= most_calls) return true;
    if (layer_->is_moving()) return false;
    const BalancingReport& report = layer_->report();
    if (report.calls % every_ != 0) return false;  // what the next look counts are calls of the next load alone
    if (report.switches > switches) return calls_behind >= behind && report.looks > looks_at_switch;
    return report.looks >= looks + 2;
  };
  while (!is_done()) {
    const BalanceCall call = calls.emplace_back(this->call(marks));
    const bool has_switched = call.switches > switches && !call.is_moving;
    calls_behind = has_switched ? calls_behind + 1 : 0;
    if (!has_switched) looks_at_switch = call.looks;
  }
  marks.mark_all();
  return calls;
}

void BalanceBed::take_times(const Marks& marks, std::span<BalanceCall> calls) {
  for (std::size_t i = 0; i < calls.size(); ++i) {
    calls[i].call_us = marks.between(mark_before(i), mark_behind(i));
    calls[i].between_us = marks.between(mark_behind(i), mark_before(i + 1));
  }
}

BalanceRun::BalanceRun(const BalanceArguments& a, const MegaArguments& layer, Lanes& lanes)
    : a_(a),
      layer_(layer),
      lanes_(lanes),
      shape_(mega_shape(layer, layer.presets.front(), value_of(fused_kinds, "--weights", layer.weights.front()), layer.ranks)) {}

BatchRouting BalanceRun::routing(int load, int tokens) const {
  BenchArguments drawn = routing_of(layer_, shape_.shape);
  drawn.seed += static_cast<std::uint64_t>(load);
  drawn.trace_layer += load;
  return make_routing(drawn, layer_.ranks, tokens);
}

RankRows BalanceRun::rows_of(const ReplicaMap& map, const BatchRouting& routing, int tokens) const {
  Routing all{layer_.ranks * tokens, routing.topk, {}, {}};
  for (const Routing& own : routing.ranks) {
    all.ids.insert(all.ids.end(), own.ids.begin(), own.ids.end());
    all.weights.insert(all.weights.end(), own.weights.begin(), own.weights.end());
  }
  const std::vector<int> tokens_of_rank(static_cast<std::size_t>(layer_.ranks), tokens);
  std::vector<double> rows(static_cast<std::size_t>(layer_.ranks), 0);
  for (const std::int32_t id : choose_copies(map, BalancingOptions().rule, all, tokens_of_rank).ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(map.placement().rank_of(id))];
  }
  return {static_cast<std::int64_t>(*std::ranges::max_element(rows)), max_over_mean(rows)};
}

/// Slots have the same bits under every placement; two stages round by where experts live.
std::string BalanceRun::wrong_outputs(BalanceBed& bed, Batch& batch, const RankOutputs& expected, int tokens) const {
  const RankOutputs found = fresh_outputs(bed, batch, tokens);
  if (const auto bad = batch.bad_outputs(tokens); bad > 0) return fmt::format("{} were not written or are not finite", bad);
  if (const Way way = bed.layer().layer(0).way(); way != Way::low_latency && way != Way::mega) return {};
  const std::size_t off = different(found, expected);
  return off == 0 ? "" : fmt::format("{} have other bits than before the change", off);
}

RankOutputs BalanceRun::fresh_outputs(BalanceBed& bed, Batch& batch, int tokens) const {
  batch.poison_outputs();
  bed.call();
  lanes_.settle(give_up_);
  bed.layer().throw_if_failed();
  return outputs_of(batch, tokens);
}

/// Calls of one load on a layer that does not know it yet.
void BalanceRun::load(BalanceBed& bed, Batch& batch, const BatchRouting& routing, Json line, int tokens) {
  DeviceBalancedLayer& layer = bed.layer();
  batch.set_routing(routing);
  for (int call = 1; call < warm_calls; ++call) bed.call();
  const RankOutputs expected = fresh_outputs(bed, batch, tokens);
  const BalancingReport before = layer.report();
  BalanceChange change;
  change.before = rows_of(layer.map(), routing, tokens);
  std::vector<DeviceSent> sent;
  for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) sent.push_back(layer.sent(gpu));
  Marks marks(lanes_);
  std::vector<BalanceCall> calls = bed.calls_of_a_load(marks, a_.calls);
  lanes_.settle(give_up_);
  layer.throw_if_failed();
  if (calls.size() >= most_calls) {
    throw InputError(
        fmt::format("load {}: the placement has not come to rest in {} calls; --copy-mb {}, of weights sent between two calls, and "
                    "--calls {}, between looks, could be more",
                    line["load"].get<int>(), calls.size(), a_.copy_mb, a_.calls));
  }
  BalanceBed::take_times(marks, calls);

  const auto phases = phases_of(calls);
  if (phases) {
    change.after = rows_of(layer.map(), routing, tokens);
    change.experts = layer.report().moved - before.moved;
    for (std::size_t gpu = 0; gpu < lanes_.gpus(); ++gpu) {
      const DeviceSent now = layer.sent(gpu);
      change.sent_bytes.push_back(static_cast<double>(now.bytes - sent[gpu].bytes));
      change.sent_seconds.push_back(now.seconds - sent[gpu].seconds);
    }
    change.decision_to_switch_us = marks.between(mark_behind(phases->decided), mark_before(phases->switched + 1));
  }
  line.update(phases ? balance_entry(calls, *phases, change) : balance_calls(calls));
  line.update({{"imbalance", layer.report().imbalance}, {"expected", layer.report().expected}});
  print_line(balance_line(line));
  if (const std::string what = wrong_outputs(bed, batch, expected, tokens); !what.empty()) {
    line["wrong"] = what;
    print_line(fmt::format("       wrong outputs: {}", what));
    ++wrong_;
  }
  rows_.push_back(line);
}

void BalanceRun::way(const std::string& name, const LayerSource& drawn, int tokens) {
  under_way_ = fmt::format("{}, {} tokens", name, tokens);
  const Json line{{"way", name}, {"tokens", tokens}};
  attempt(rows_, line, fmt::format("{:>6} {:<12}", tokens, name), [&] {
    const BatchRouting first = routing(0, tokens);
    LayerSource source = drawn;
    source.shape.topk = first.topk;  // a recording's own
    Batch batch(lanes_, first, source.shape.hidden, layer_.seed);
    batch.set_tokens(tokens);
    BalanceBed bed(lanes_, batch, source, a_, real_way(name, "--way"), tokens);
    for (int load = 0; load < a_.changes; ++load) {
      under_way_ = fmt::format("{}, {} tokens, load {}", name, tokens, load + 1);
      const BatchRouting routing = this->routing(load, tokens);
      Json entry = line;
      entry.update({{"load", load + 1},
                    {"routing", routing.note},
                    {"graph", !bed.is_eager()},
                    {"staging_bytes", bed.layer().staging_bytes()},
                    {"weight_bytes", bed.layer().layer(0).weight_bytes()}});
      this->load(bed, batch, routing, entry, tokens);
    }
  });
}

void BalanceRun::all(const std::function<void()>& save, const std::function<void()>& give_up) {
  give_up_ = give_up;
  const cuda::DeviceScope scope(lanes_.device(0));
  under_way_ = "drawing of weights";
  const DrawnLayer drawn(shape_, layer_.seed);
  print_line(fmt::format("{} on {}, {} {}: {} experts and {} copies more, at most {} MiB a GPU between two calls, {} calls ahead",
                         count_of(layer_.ranks, "rank"), count_of(static_cast<std::int64_t>(lanes_.gpus()), "GPU"), shape_.name,
                         word_of(kinds, shape_.kind), shape_.shape.experts, extra_of(a_), a_.copy_mb, a_.calls_ahead));
  print_line("us a call, medians and the slowest, before the change, during and after it; calls and us from decision to switch");
  print_line(balance_title());
  for (const int tokens : a_.sizes) {
    for (const std::string& name : a_.ways) {
      way(name, drawn.source(), tokens);
      machine_ = machine_of(lanes_);  // now that GPUs are awake, for their clocks
      save();
    }
  }
}

Json BalanceRun::json() const {
  Json json = result_head("balance", a_.commit, machine_);
  json.update({{"ranks", layer_.ranks}, {"preset", shape_.name}});
  json.update(layer_json(shape_.shape, shape_.kind));
  json.update({{"extra", extra_of(a_)},
               {"every", a_.calls},
               {"copy_bytes", static_cast<std::size_t>(a_.copy_mb) << 20},
               {"calls_ahead", a_.calls_ahead},
               {"staged_experts", a_.staged ? Json(*a_.staged) : Json()},
               {"rows", rows_}});
  return json;
}

Json measure_balance(const BalanceArguments& a, const SaveJson& save, int& status) {
  check_arguments(a);
  MegaArguments layer = mega_arguments(a.layer, "heddle bench balance");
  layer.ways = {"none"};
  layer.tokens = a.sizes;
  if (a.layer.routing.empty()) layer.routing = "zipf:1";
  check_arguments(layer);
  Lanes lanes(devices_for("balance", layer.ranks, layer.gpus), std::chrono::milliseconds(layer.deadline_ms));
  BalanceRun run(a, layer, lanes);
  const Json json = run_and_save(run, lanes, save);
  if (run.wrong() > 0) status = 1;
  return json;
}

}  // namespace heddle::tool
