#include "bench_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>

#include "bench_bytes.hpp"
#include "bench_machine.hpp"
#include "bench_nccl.hpp"
#include "bench_studies.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"
#include "heddle/version.hpp"
#include "json_file.hpp"
#include "words.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

const std::map<std::string, Way> own_ways{{"gather", Way::gather},
                                          {"normal", Way::normal},
                                          {"low_latency", Way::low_latency},
                                          {"elastic", Way::elastic},
                                          {"one_sided", Way::one_sided}};

/// A way in the words of the command line, with what distinguishes its variants.
struct Row {
  std::string way;
  Configuration configuration;
};

class Run {
 public:
  Run(const BenchArguments& a, Lanes& lanes) : a_(a), lanes_(lanes) {}

  void all();
  Json json() const;

 private:
  void measure_floor();
  void round_trips(Batch& batch);
  void round_trip(Batch& batch, const Row& row);
  void nccl(Batch& batch, int tokens);
  void layout_costs(Batch& batch);
  void layout_cost(Batch& batch, const Row& row);
  void sweeps(Batch& batch);
  void overlaps(Batch& batch);
  std::vector<Row> rows(const std::vector<std::string>& ways) const;

  /// Does one configuration; what does not fit is reported and not the end.
  template <class Work>
  void attempt(Json& to, const Json& entry, const std::string& label, Work work);
  Json entry_of(const Batch& batch, const Row& row) const;
  void add_times(Json& entry, const Times& times, const Traffic& traffic) const;
  double floor_us(const Traffic& traffic) const { return 1e6 * (traffic.floor_seconds + word_seconds(lanes_)) + empty_us_; }
  int ranks_a_gpu() const { return (a_.ranks + static_cast<int>(lanes_.gpus()) - 1) / static_cast<int>(lanes_.gpus()); }

  const BenchArguments& a_;
  Lanes& lanes_;
  double empty_us_ = 0;
  std::string routing_note_;
  int topk_ = 0;
  std::shared_ptr<NcclCommunicators> communicators_;
  std::string no_nccl_;  ///< why there are none
  Json floor_ = Json::object(), rows_ = Json::array(), layouts_ = Json::array(), sweeps_ = Json::array(), overlaps_ = Json::array();
};

std::string label_of(const std::string& way, const Configuration& c) {
  return fmt::format("{:<12} {:<5} {:<5} {:>6}", way, word_of(wires, c.wire), word_of(wires, c.combine_wire), c.tokens);
}

bool for_lack_of_memory(const Error& error) {
  return std::string(error.what()).find(cudaGetErrorName(cudaErrorMemoryAllocation)) != std::string::npos;
}

void print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

template <class Work>
void Run::attempt(Json& to, const Json& entry, const std::string& label, Work work) {
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
          {"sms", c.sms}};
}

void Run::add_times(Json& entry, const Times& times, const Traffic& traffic) const {
  const double middle = median(times.round_trips);
  entry["median_us"] = middle;
  entry["least_us"] = *std::min_element(times.round_trips.begin(), times.round_trips.end());
  entry["most_us"] = *std::max_element(times.round_trips.begin(), times.round_trips.end());
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
  entry["samples_us"] = times.round_trips;
}

void print_times(const std::string& label, const Json& entry, const std::string& remark) {
  const auto number = [&](const char* field) { return entry.at(field).get<double>(); };
  print_line(fmt::format("{} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.3f} {:>9.3f} {:>5.0f}% {:>8.1f} {:>6.2f}{}", label,
                         number("median_us"), number("least_us"), number("most_us"), number("dispatch_us"), number("combine_us"),
                         number("remote_bytes") / 1e6, number("local_bytes") / 1e6, 100 * number("share_of_link"),
                         number("floor_us"), number("times_floor"), remark));
}

void Run::measure_floor() {
  const int sms = a_.sms > 0 ? a_.sms : lanes_.sms();
  const double grid = time_empty(lanes_, ranks_a_gpu(), sms, false, a_.round_trips, a_.replays);
  const double cluster = time_empty(lanes_, ranks_a_gpu(), 16 * ranks_a_gpu(), true, a_.round_trips, a_.replays);
  floor_ = {{"empty_grid_us", grid}, {"empty_cluster_us", cluster}, {"ctas", sms}, {"word_us", 1e6 * word_seconds(lanes_)}};
  empty_us_ = std::min(grid, cluster);
  print_line(
      fmt::format("an empty round trip, two launches in a graph: {:.2f} us with {} CTAs of 256 threads a GPU, {:.2f} us with one "
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
    if (own_ways.count(way_name) == 0) continue;
    const Way way = own_ways.at(way_name);
    for (const std::string& wire : a_.wires) {
      for (const std::string& back : a_.combine_wires) {
        for (const int tokens : a_.tokens) {
          all.push_back({way_name,
                         {way, value_of(wires, "--wire", wire), value_of(wires, "--combine-wire", back), default_layout(way),
                          tokens, a_.experts, a_.sms}});
        }
      }
    }
  }
  return all;
}

void Run::round_trip(Batch& batch, const Row& row) {
  const std::string label = label_of(row.way, row.configuration);
  Json entry = entry_of(batch, row);
  attempt(rows_, entry, label, [&] {
    Setup setup(row.configuration, batch, lanes_);
    const bool eager = row.configuration.way == Way::normal;
    const Times times = eager ? time_eager(setup, a_.replays) : time_replays(setup, a_.round_trips, a_.replays);
    add_times(entry, times, traffic_of(setup.options(), batch, row.configuration.tokens));
    entry["heap_bytes"] = setup.heap_bytes();
    entry["graph"] = !eager;
    print_times(label, entry, eager ? fmt::format("  host blocked {:.1f} us", median(times.host_blocked)) : "");
    rows_.push_back(entry);
  });
}

void Run::nccl(Batch& batch, int tokens) {
  Row row{"nccl", {}};
  row.configuration.way = Way::gather;  // whose bytes these are
  row.configuration.tokens = tokens;
  row.configuration.experts = a_.experts;
  const std::string label = label_of("nccl", row.configuration);
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
  print_line(fmt::format("\nhidden {}\n{:<12} {:<5} {:<5} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6} {:>8} {:>6}",
                         batch.hidden(), "way", "wire", "back", "tokens", "median", "least", "most", "dispatch", "combine",
                         "remote MB", "local MB", "link", "floor", "times"));
  for (const std::string& way : a_.ways) {
    for (const Row& row : rows({way})) round_trip(batch, row);
    for (const int tokens : way == "nccl" ? a_.tokens : std::vector<int>{}) nccl(batch, tokens);
  }
}

void Run::layout_cost(Batch& batch, const Row& row) {
  const std::string label = label_of(row.way, row.configuration) + fmt::format(" {:<10}", name(row.configuration.arrived));
  Json entry = entry_of(batch, row);
  attempt(layouts_, entry, label, [&] {
    Setup setup(row.configuration, batch, lanes_);
    const bool eager = row.configuration.way == Way::normal;
    const Times times = eager ? time_eager(setup, a_.replays) : time_replays(setup, a_.round_trips, a_.replays);
    entry["dispatch_us"] = median(times.dispatch);
    entry["combine_us"] = median(times.combine);
    std::string line = fmt::format("{} {:>9.2f} {:>9.2f}", label, median(times.dispatch), median(times.combine));
    if (!eager) {
      const Traffic traffic = traffic_of(setup.options(), batch, row.configuration.tokens);
      const ReceiveTimes halves = time_receiving(setup, 2e6 * traffic.floor_seconds, a_.round_trips, std::min(a_.replays, 10));
      entry["receive_us"] = halves.receive;
      entry["collect_us"] = halves.collect;
      entry["empty_us"] = halves.empty;
      line += fmt::format(" {:>9.2f} {:>9.2f} {:>9.2f}", halves.receive, halves.collect, halves.empty);
    }
    print_line(line);
    layouts_.push_back(entry);
  });
}

void Run::layout_costs(Batch& batch) {
  print_line(fmt::format(
      "\nhidden {}: layouts. receive: dispatch_receive when all rows are there; collect: combine_receive likewise; empty: a launch "
      "that does nothing, taken in the same way\n{:<12} {:<5} {:<5} {:>6} {:<10} {:>9} {:>9} {:>9} {:>9} {:>9}",
      batch.hidden(), "way", "wire", "back", "tokens", "layout", "dispatch", "combine", "receive", "collect", "empty"));
  for (Row row : rows(a_.ways)) {
    for (const ArrivedLayout layout : {ArrivedLayout::routed, ArrivedLayout::masked, ArrivedLayout::contiguous}) {
      if (!allows_layout(row.configuration.way, layout)) continue;
      row.configuration.arrived = layout;
      layout_cost(batch, row);
    }
  }
}

void Run::sweeps(Batch& batch) {
  std::vector<int> sms{0};
  sms.insert(sms.end(), a_.sweep.begin(), a_.sweep.end());
  std::string title = fmt::format("\nhidden {}: by CTAs a GPU\n{:<12} {:<5} {:<5} {:>6} {:>8}", batch.hidden(), "way", "wire",
                                  "back", "tokens", "rule");
  for (const int ctas : a_.sweep) title += fmt::format(" {:>8}", ctas);
  print_line(title + fmt::format(" {:>14}", "rule over best"));
  for (const Row& row : rows(a_.ways)) {
    const std::string label = label_of(row.way, row.configuration);
    if (row.configuration.way == Way::normal) {
      print_line(label + " not swept: it is not captured in a graph");
      continue;
    }
    Json entry = entry_of(batch, row);
    attempt(sweeps_, entry, label, [&] {
      Setup setup(row.configuration, batch, lanes_);
      const std::vector<double> medians = time_sweep(setup, sms, a_.round_trips, a_.replays);
      std::string line = label;
      for (const double value : medians) line += fmt::format(" {:>8.2f}", value);
      const double ratio = medians.front() / *std::min_element(medians.begin(), medians.end());
      print_line(line + fmt::format(" {:>14.3f}", ratio));
      entry["rule_us"] = medians.front();
      entry["ctas"] = a_.sweep;
      entry["median_us"] = std::vector<double>(medians.begin() + 1, medians.end());
      entry["rule_over_best"] = ratio;
      sweeps_.push_back(entry);
    });
  }
}

void Run::overlaps(Batch& batch) {
  print_line(
      fmt::format("\nhidden {}: halves of low_latency around other work, us a round trip (the work comes twice)\n"
                  "{:<12} {:<5} {:<5} {:>6} {:>5} {:>9} {:>9} {:>9} {:>11} {:>7} {:>11} {:>7}",
                  batch.hidden(), "way", "wire", "back", "tokens", "CTAs", "work CTAs", "work", "exchange", "one stream", "hidden",
                  "two streams", "hidden"));
  for (Row row : rows({"low_latency"})) {
    for (const int ctas : a_.overlap_sms) {
      const int work_ctas = a_.work_sms > 0 ? a_.work_sms : std::max(1, lanes_.sms() - ctas);
      row.configuration.sms = ctas;
      const std::string label = label_of(row.way, row.configuration) + fmt::format(" {:>5} {:>9}", ctas, work_ctas);
      for (const int microseconds : a_.overlap) {
        Json entry = entry_of(batch, row);
        attempt(overlaps_, entry, label, [&] {
          Setup setup(row.configuration, batch, lanes_);
          const OverlapTimes times = time_overlap(setup, microseconds, work_ctas, a_.round_trips, a_.replays);
          const double one = times.work + times.exchange - times.one_stream;
          const double two = times.work + times.exchange - times.two_streams;
          print_line(fmt::format("{} {:>9.2f} {:>9.2f} {:>11.2f} {:>7.2f} {:>11.2f} {:>7.2f}", label, times.work, times.exchange,
                                 times.one_stream, one, times.two_streams, two));
          entry["work_ctas"] = work_ctas;
          entry["work_us"] = times.work;
          entry["exchange_us"] = times.exchange;
          entry["one_stream_us"] = times.one_stream;
          entry["one_stream_hidden_us"] = one;
          entry["two_streams_us"] = times.two_streams;
          entry["two_streams_hidden_us"] = two;
          overlaps_.push_back(entry);
        });
      }
    }
  }
}

void Run::all() {
  const int most = *std::max_element(a_.tokens.begin(), a_.tokens.end());
  const BatchRouting routing = make_routing(a_, a_.ranks, most);
  routing_note_ = routing.note;
  topk_ = routing.topk;
  print_line(
      fmt::format("{} ranks on {} GPUs, {} experts, top-{}, routing {}; us a round trip (dispatch + combine), median of {} "
                  "replays of {}",
                  a_.ranks, lanes_.gpus(), a_.experts, topk_, routing_note_, a_.replays, a_.round_trips));
  measure_floor();
  const bool round_trips_wanted = !a_.layout_cost && a_.sweep.empty() && a_.overlap.empty();
  if (round_trips_wanted && std::find(a_.ways.begin(), a_.ways.end(), "nccl") != a_.ways.end()) {
    try {
      if (a_.ranks != static_cast<int>(lanes_.gpus())) throw InputError("NCCL needs a GPU for each rank; ranks share GPUs here");
      communicators_ = make_communicators(lanes_);
    } catch (const Error& error) {
      no_nccl_ = error.what();
    }
  }
  for (const int hidden : a_.hidden) {
    Batch batch(lanes_, routing, hidden, a_.seed);
    if (round_trips_wanted) round_trips(batch);
    if (a_.layout_cost) layout_costs(batch);
    if (!a_.sweep.empty()) sweeps(batch);
    if (!a_.overlap.empty()) overlaps(batch);
  }
}

Json Run::json() const {
  return {{"heddle", version},
          {"benchmark", "exchange"},
          {"date", now_in_utc()},
          {"commit", a_.commit},
          {"command", command_line()},
          {"machine", machine_of(lanes_)},
          {"ranks", a_.ranks},
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
          {"overlap", overlaps_}};
}

/// Everything that can be said before a GPU is asked.
void check_arguments(const BenchArguments& a) {
  const auto positive = [](const char* option, const std::vector<int>& values) {
    if (values.empty()) throw InputError(fmt::format("{}: give at least one number", option));
    for (const int value : values) {
      if (value < 1) throw InputError(fmt::format("{} {}: at least 1 is needed", option, value));
    }
  };
  positive("--tokens", a.tokens);
  positive("--hidden", a.hidden);
  if (!a.sweep.empty()) positive("--sms-sweep", a.sweep);
  if (!a.overlap.empty()) positive("--overlap", a.overlap);
  positive("--overlap-sms", a.overlap_sms);
  for (const std::string& way : a.ways) {
    if (way != "nccl" && own_ways.count(way) == 0)
      throw InputError(fmt::format("--way does not know '{}'; it takes {}, nccl", way, keys(own_ways)));
  }
  for (const std::string& wire : a.wires) value_of(wires, "--wire", wire);
  for (const std::string& wire : a.combine_wires) value_of(wires, "--combine-wire", wire);
  if (a.ranks < 0 || a.gpus < 0 || a.sms < 0 || a.experts < 1 || a.topk < 1)
    throw InputError("--ranks, --gpus and --sms cannot be negative, --experts and --topk are at least 1");
}

}  // namespace

void bench_exchange(const BenchArguments& arguments) {
  BenchArguments a = arguments;
  check_arguments(a);
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess || present == 0)
    throw InputError("heddle bench exchange needs a GPU; there is none here");
  if (a.gpus == 0) a.gpus = a.ranks == 0 ? present : std::min(present, a.ranks);
  if (a.gpus > present) throw InputError(fmt::format("--gpus {}: this machine has {}", a.gpus, present));
  if (a.ranks == 0) a.ranks = a.gpus;
  std::vector<int> devices;
  for (int device = 0; device < a.gpus; ++device) devices.push_back(device);
  Lanes lanes(devices, std::chrono::milliseconds(a.deadline_ms));
  Run run(a, lanes);
  try {
    run.all();
  } catch (const Error& error) {
    if (!a.json.empty()) {
      Json incomplete = run.json();
      incomplete["failed"] = error.what();
      write_json(a.json, incomplete);
    }
    throw;
  }
  if (!a.json.empty()) write_json(a.json, run.json());
}

}  // namespace heddle::tool
