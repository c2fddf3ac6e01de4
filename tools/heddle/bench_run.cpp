#include "bench_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "bench_machine.hpp"
#include "bench_memory.hpp"
#include "bench_nccl.hpp"
#include "bench_studies.hpp"
#include "heddle/error.hpp"
#include "words.hpp"

namespace heddle::tool {

const std::map<std::string, Way> own_ways{{"gather", Way::gather},
                                          {"normal", Way::normal},
                                          {"low_latency", Way::low_latency},
                                          {"elastic", Way::elastic},
                                          {"one_sided", Way::one_sided}};
const std::map<std::string, bool> off_on{{"off", false}, {"on", true}};

std::string label_of(const Row& row) {
  const Configuration& c = row.configuration;
  return fmt::format("{:<12} {:<5} {:<5} {:>6} {:>5} {:>6} {:>5}", row.way, word_of(wires, c.wire), word_of(wires, c.combine_wire),
                     c.tokens, c.bulk, c.tagged, word_of(off_on, c.counters));
}
std::string label_title() {
  return fmt::format("{:<12} {:<5} {:<5} {:>6} {:>5} {:>6} {:>5}", "way", "wire", "back", "tokens", "bulk", "tagged", "count");
}

namespace {

void print_times(const std::string& label, const Json& entry, const std::string& remark) {
  const auto number = [&](const char* field) { return entry.at(field).get<double>(); };
  print_line(fmt::format("{} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.3f} {:>9.3f} {:>5.0f}% {:>8.1f} {:>6.2f}{}", label,
                         number("median_us"), number("least_us"), number("most_us"), number("dispatch_us"), number("combine_us"),
                         number("remote_bytes") / 1e6, number("local_bytes") / 1e6, 100 * number("share_of_link"),
                         number("floor_us"), number("times_floor"), remark));
}

void print_title(int hidden) {
  print_line(fmt::format("\nhidden {}\n{} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>8} {:>6}", hidden, label_title(),
                         "median", "least", "most", "dispatch", "combine", "remote MB", "local MB", "link", "floor", "times"));
}

}  // namespace

void attempt(Json& to, const Json& entry, const std::string& label, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::input && !for_lack_of_memory(error)) throw;
    print_line(fmt::format("{} not measured: {}", label, error.what()));
    Json failed = entry;
    failed["failed"] = error.what();
    to.push_back(failed);
  }
}

Json Run::entry_of(const Batch& batch, const Row& row) const {
  const Configuration& c = row.configuration;
  return {{"way", row.way},
          {"wire", word_of(wires, c.wire)},
          {"combine_wire", word_of(wires, c.combine_wire)},
          {"arrived", name(c.arrived)},
          {"hidden", batch.hidden()},
          {"tokens", c.tokens},
          {"sms", c.sms},
          {"bulk_bytes", c.bulk},
          {"tagged_tokens", c.tagged},
          {"counters", c.counters}};
}

void Run::add_times(Json& entry, const Times& times, const Traffic& traffic) const {
  const double middle = median(times.round_trips);
  entry.update(summary(times.round_trips));
  entry["dispatch_us"] = median(times.dispatch);
  entry["combine_us"] = median(times.combine);
  if (!times.host_blocked.empty()) entry["host_blocked_us"] = median(times.host_blocked);
  entry["remote_bytes"] = traffic.remote_bytes;
  entry["local_bytes"] = traffic.local_bytes;
  entry["remote_rows"] = traffic.remote_rows;
  entry["local_rows"] = traffic.local_rows;
  entry["share_of_link"] = traffic.remote_bytes / (middle * 1e-6) / link_rate();
  entry["floor_us"] = floor_us(traffic);
  entry["times_floor"] = middle / floor_us(traffic);
}

std::string Run::add_counted(Json& entry, const Counted& counted, double median_us) const {
  entry["counted"] = {{"calls", counted.calls},
                      {"dispatch_wait_us", counted.dispatch_wait},
                      {"combine_wait_us", counted.combine_wait},
                      {"experts_over_mean", counted.experts_over_mean}};
  std::string remark = fmt::format("  waited {:.1f} + {:.1f} us", counted.dispatch_wait, counted.combine_wait);
  if (!uncounted_us_) return remark;
  entry["counters_cost_us"] = median_us - *uncounted_us_;
  return remark + fmt::format(", counting {:+.2f} us", median_us - *uncounted_us_);
}

void Run::measure_floor() {
  const int sms = a_.sms > 0 ? a_.sms : lanes_.sms();
  const double grid = time_empty(lanes_, ranks_a_gpu(), sms, false, a_.round_trips, a_.replays);
  double cluster = grid;
  try {
    cluster = time_empty(lanes_, ranks_a_gpu(), 16 * ranks_a_gpu(), true, a_.round_trips, a_.replays);
  } catch (const Error& error) {
    print_line(fmt::format("clusters of 16 CTAs do not fit here: {}", error.what()));
  }
  floor_ = {{"empty_grid_us", grid}, {"empty_cluster_us", cluster}, {"ctas", sms}, {"word_us", 1e6 * word_seconds(lanes_)}};
  empty_us_ = std::min(grid, cluster);
  print_line(
      fmt::format("an empty round trip, two launches in a graph: {:.2f} us with {} CTAs of 512 threads a GPU, {:.2f} us with one "
                  "cluster of 16 a rank",
                  grid, sms, cluster));
  print_line(
      fmt::format("floor: the lesser of these, {:.2f} us for two words between GPUs, and rows at {:.0f} GB/s a link or a "
                  "copy in memory",
                  1e6 * word_seconds(lanes_), link_rate() / 1e9));
}

std::vector<Row> Run::rows(const std::vector<std::string>& ways) const {
  std::vector<Row> all;
  for (const std::string& way_name : ways) {
    const bool cpu_sync = way_name == "elastic_sync";
    if (own_ways.count(way_name) == 0 && !cpu_sync) continue;
    const Way way = cpu_sync ? Way::elastic : own_ways.at(way_name);
    for (const std::string& wire : a_.wires) {
      for (const std::string& back : a_.combine_wires) {
        const bool any_bf16 = wire == "bf16" || back == "bf16";
        for (const int tokens : a_.tokens) {
          for (const int bulk : a_.bulk) {
            if (bulk > 0 && !any_bf16) continue;  // nothing goes by bulk copies
            for (const int tagged : a_.tagged) {
              const bool any_tagged = way == Way::gather && wire == "bf16" && back == "bf16" && tokens <= tagged;
              if (tagged > 0 && !any_tagged) continue;       // nothing travels tagged
              for (const auto& [word, counters] : off_on) {  // without comes first, to be compared with
                if (std::find(a_.counters.begin(), a_.counters.end(), word) == a_.counters.end()) continue;
                all.push_back({way_name,
                               {way, value_of(wires, "--wire", wire), value_of(wires, "--combine-wire", back), default_layout(way),
                                tokens, a_.experts, a_.sms, bulk, tagged, counters, cpu_sync, nullptr}});
              }
            }
          }
        }
      }
    }
  }
  return all;
}

void Run::round_trip(Batch& batch, const Row& row) {
  const std::string label = label_of(row);
  Json entry = entry_of(batch, row);
  const bool counters = row.configuration.counters;
  if (!counters) uncounted_us_.reset();
  attempt(rows_, entry, label, [&] {
    Setup setup(row.configuration, batch, lanes_);
    const bool eager = row.configuration.is_eager();
    const Times times = eager ? time_eager(setup, a_.replays) : time_replays(setup, a_.round_trips, a_.replays);
    add_times(entry, times, traffic_of(setup.options(), batch, row.configuration.tokens));
    entry["heap_bytes"] = setup.heap_bytes();
    entry["graph"] = !eager;
    entry["results_in_place"] = setup.results_in_place();
    std::string remark = eager ? fmt::format("  host blocked {:.1f} us", median(times.host_blocked)) : "";
    if (setup.results_in_place()) remark += "  in place";
    const double median_us = median(times.round_trips);
    if (counters) remark += add_counted(entry, setup.counted(), median_us);
    if (!counters && a_.counters.size() > 1) uncounted_us_ = median_us;
    print_times(label, entry, remark);
    rows_.push_back(entry);
  });
}

void Run::nccl_round_trip(Batch& batch, int tokens) {
  Row row{"nccl", {}};
  row.configuration.way = Way::gather;  // whose bytes these are
  row.configuration.tokens = tokens;
  row.configuration.experts = a_.experts;
  const std::string label = label_of(row);
  Json entry = entry_of(batch, row);
  attempt(rows_, entry, label, [&] {
    if (communicators_ == nullptr) throw InputError(no_nccl_);
    std::optional<NcclTimes> best;
    std::string best_form;
    for (const bool symmetric : {false, true}) {
      const NcclTimes times = time_nccl(*communicators_, lanes_, batch, tokens, a_.round_trips, a_.replays, symmetric);
      const std::string form = symmetric ? "symmetric" : "plain";
      if (!times.failed.empty()) {
        entry["forms"][form] = {{"failed", times.failed}};
        continue;
      }
      entry["forms"][form] = {{"median_us", median(times.round_trips)}, {"samples_us", times.round_trips}};
      if (best && median(best->round_trips) <= median(times.round_trips)) continue;
      best = times;
      best_form = form;
    }
    if (!best) throw InputError(entry["forms"]["plain"]["failed"].get<std::string>());
    Times times;
    times.round_trips = best->round_trips;
    times.dispatch = best->dispatch;
    times.combine = best->combine;
    entry["form"] = best_form;
    entry["nccl"] = communicators_->version();
    add_times(entry, times, traffic_of(options_of(row.configuration, batch), batch, tokens));
    print_times(label, entry, "  " + best_form);
    rows_.push_back(entry);
  });
}

void Run::round_trips(Batch& batch) {
  print_title(batch.hidden());
  for (const Row& row : rows(a_.ways)) round_trip(batch, row);
}

void Run::nccl(Batch& batch) {
  if (communicators_ == nullptr && no_nccl_.empty()) {
    try {
      if (a_.ranks != static_cast<int>(lanes_.gpus())) throw InputError("NCCL needs a GPU for each rank; ranks share GPUs here");
      communicators_ = make_communicators(lanes_);
    } catch (const Error& error) {
      no_nccl_ = error.what();
    }
  }
  print_title(batch.hidden());
  if (wants("nccl")) {
    for (const int tokens : a_.tokens) nccl_round_trip(batch, tokens);
  }
  for (Row row : wants("gather_nccl") ? rows({"gather"}) : std::vector<Row>{}) {
    if (row.configuration.bulk > 0 || row.configuration.tagged > 0 || row.configuration.counters) continue;
    row.way = "gather_nccl";
    row.configuration.nccl = communicators_;
    if (communicators_ != nullptr) {
      round_trip(batch, row);
    } else {
      attempt(rows_, entry_of(batch, row), label_of(row), [&] { throw InputError(no_nccl_); });
    }
  }
}

void Run::all(const std::function<void()>& save) {
  const int most = *std::max_element(a_.tokens.begin(), a_.tokens.end());
  const BatchRouting routing = make_routing(a_, a_.ranks, most);
  routing_note_ = routing.note;
  topk_ = routing.topk;
  print_line(
      fmt::format("{} ranks on {} GPUs, {} experts, top-{}, routing {}; us a round trip (dispatch + combine), median of {} "
                  "replays of {}",
                  a_.ranks, lanes_.gpus(), a_.experts, topk_, routing_note_, a_.replays, a_.round_trips));
  measure_floor();
  machine_ = machine_of(lanes_);  // while the GPUs are awake, for their clocks
  const bool round_trips_wanted = !a_.layout_cost && a_.sweep.empty() && a_.overlap.empty();
  for (const int hidden : a_.hidden) {
    Batch batch(lanes_, routing, hidden, a_.seed);
    if (round_trips_wanted && !rows(a_.ways).empty()) round_trips(batch);
    if (a_.layout_cost) layout_costs(batch);
    if (!a_.sweep.empty()) sweeps(batch);
    if (!a_.overlap.empty()) overlaps(batch);
  }
  // NCCL comes last: once it has opened GPUs to each other, freeing memory on one waits for the kernels of all, and those of
  // `normal`, which frees memory when a call needs more than any before, may be waiting for that very call.
  if (!round_trips_wanted || !(wants("nccl") || wants("gather_nccl"))) return;
  save();
  for (const int hidden : a_.hidden) {
    Batch batch(lanes_, routing, hidden, a_.seed);
    nccl(batch);
  }
}

Json Run::json() const {
  Json json = result_head("exchange", a_.commit, machine_);
  json.update({{"ranks", a_.ranks},
               {"hidden", a_.hidden.front()},
               {"experts", a_.experts},
               {"topk", topk_},
               {"routing", routing_note_},
               {"round_trips_a_replay", a_.round_trips},
               {"link_bytes_per_second", link_rate()},
               {"floor", floor_},
               {"rows", rows_},
               {"layouts", layouts_},
               {"sms_sweep", sweeps_},
               {"overlap", overlaps_}});
  return json;
}

}  // namespace heddle::tool
