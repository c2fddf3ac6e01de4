// Dispatch and combine by themselves on the host engine: ranks as threads, no experts in between.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>

#include "heddle/exchange.hpp"
#include "host_calls.hpp"
#include "provenance.hpp"
#include "suite.hpp"
#include "suite_flags.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

std::size_t index(int value) { return static_cast<std::size_t>(value); }

struct TripArguments {
  int ranks = 2, experts = 64, topk = 6, hidden = 1024, calls = 9;
  std::vector<int> sizes;
  std::vector<std::string> ways{"gather", "normal", "low_latency", "elastic", "elastic_sync", "one_sided"};
};

void add_trip_flags(CLI::App& app, TripArguments& a) {
  app.add_option("--ranks", a.ranks);
  app.add_option("--experts", a.experts);
  app.add_option("--topk", a.topk);
  app.add_option("--hidden", a.hidden);
  app.add_option("--calls", a.calls);
  app.add_option("--sizes", a.sizes)->delimiter(',');
  app.add_option("--way", a.ways)->delimiter(',');
}

ExchangeOptions options_of(const TripArguments& a, const std::string& way, int tokens) {
  ExchangeOptions options;
  options.cpu_sync = way == "elastic_sync";
  options.way = options.cpu_sync ? Way::elastic : real_way(way, "--way");
  options.hidden = a.hidden;
  options.topk = a.topk;
  options.cap = tokens;
  options.placement = Placement::contiguous(a.experts, a.ranks);
  options.wire = Wire::bf16;
  options.arrived = default_layout(options.way);
  return options;
}

/// One rank: random tokens, and results that are what memory holds.
class TripRank {
 public:
  TripRank(Group& group, const ExchangeOptions& options)
      : options_(options),
        hidden_(index(options.cap) * index(options.hidden), to_bf16(1.0f)),
        out_(hidden_.size()),
        routing_(draw_routing(uniform_popularity(options.placement.experts()),
                              {options.cap, options.topk, static_cast<std::uint64_t>(group.rank() + 1), 0.0, 1.0f})) {
    const ExchangeMemory memory = exchange_memory(options);
    workspace_ = std::make_unique<Workspace>(group, memory.heap_bytes(group.ranks()), describe(options));
    exchange_ = create_exchange(*workspace_, options, memory);
  }

  void dispatch() {
    arrived_ = exchange_->dispatch({options_.cap, hidden_.data(), routing_.ids.data(), routing_.weights.data(), {}},
                                   {options_.cap, Phase::decode});
    const std::size_t wanted = index(arrived_.room) * hidden_.size() / index(options_.cap);
    if (results_.size() < wanted) results_.resize(wanted);  // in the call that warms up, but for ways of exact sizes
  }
  void combine() { exchange_->combine(results_.data(), {.out = out_.data()}); }
  const Arrived& arrived() const { return arrived_; }
  ExchangeTraffic take_traffic() { return exchange_->take_traffic(); }
  std::size_t heap_bytes() const { return workspace_->bytes(); }
  void close() { workspace_->close(); }

 private:
  ExchangeOptions options_;
  std::vector<bf16> hidden_, out_, results_;
  Routing routing_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<Exchange> exchange_;
  Arrived arrived_;
};

/// Of every call the slowest rank, microseconds; of the last call what all ranks moved.
struct SeenTrips {
  std::vector<double> total, dispatch, combine, regroup;
  ExchangeTraffic traffic;
  bool host_waited = false;
  std::size_t heap_bytes = 0;
};

SeenTrips see(const ExchangeOptions& options, int ranks, int calls, const std::string& way) {
  const std::vector<double> none(index(calls), 0.0);
  SeenTrips seen{none, none, none, none, {}, false, 0};
  std::mutex mutex;
  on_thread_group(ranks, 30000, way, [&](Group& group) {
    TripRank rank(group, options);
    for (int call = -1; call < calls; ++call) {  // the first one warms up
      group.barrier("start of a round trip");
      const auto begin = Clock::now();
      rank.dispatch();
      const auto middle = Clock::now();
      rank.combine();
      const auto end = Clock::now();
      const ExchangeTraffic traffic = rank.take_traffic();
      if (call < 0) continue;
      const std::lock_guard lock(mutex);
      const auto slowest = [at = index(call)](std::vector<double>& all, double us) { all[at] = std::max(all[at], us); };
      slowest(seen.total, std::chrono::duration<double, std::micro>(end - begin).count());
      slowest(seen.dispatch, std::chrono::duration<double, std::micro>(middle - begin).count());
      slowest(seen.combine, std::chrono::duration<double, std::micro>(end - middle).count());
      slowest(seen.regroup, 1e6 * rank.arrived().regroup_seconds);
      if (call + 1 < calls) continue;
      seen.traffic.remote_bytes += traffic.remote_bytes;
      seen.traffic.local_bytes += traffic.local_bytes;
      seen.host_waited = rank.arrived().host_waited;
      seen.heap_bytes = rank.heap_bytes();
    }
    rank.close();
  });
  return seen;
}

Json row_of(const std::string& way, const ExchangeOptions& options, const SeenTrips& seen) {
  Json row{{"way", way}, {"wire", "bf16"}, {"combine_wire", "bf16"}, {"arrived", name(options.arrived)}, {"tokens", options.cap}};
  row.update(summary(seen.total));
  row["dispatch_us"] = median(seen.dispatch);
  row["combine_us"] = median(seen.combine);
  row["regroup_us"] = median(seen.regroup);
  row["remote_bytes"] = seen.traffic.remote_bytes;
  row["local_bytes"] = seen.traffic.local_bytes;
  row["host_waited"] = seen.host_waited;
  row["heap_bytes"] = seen.heap_bytes;
  print_line(fmt::format("{:>6} {:<12} {:>10.1f} us: dispatch {:.1f} (of that laid out {:.1f}), combine {:.1f}", options.cap, way,
                         median(seen.total), median(seen.dispatch), median(seen.regroup), median(seen.combine)));
  return row;
}

}  // namespace

Measured measure_host_trips(const std::string& typed, const std::string& commit) {
  TripArguments a;
  read_flags(typed, a, add_trip_flags);
  Json rows = Json::array();
  for (const int tokens : a.sizes) {
    for (const std::string& way : a.ways) {
      const ExchangeOptions options = options_of(a, way, tokens);
      rows.push_back(row_of(way, options, see(options, a.ranks, a.calls, way)));
    }
  }
  Json json = result_head("trips", commit, host_machine_json());
  json.update(
      {{"ranks", a.ranks}, {"hidden", a.hidden}, {"experts", a.experts}, {"topk", a.topk}, {"routing", "uniform"}, {"rows", rows}});
  return {json, ""};
}

}  // namespace heddle::tool
