// Dispatch of 4,096 rows of 10,240 bytes by each way, against memcpy of as many bytes by as many threads in
// the same run. `of_memcpy` is the rate reached as a share of memcpy's, `without_regroup` that without laying
// rows out by expert (a phase of its own): at least 0.5 is wanted.
//
// Ranks are threads. Rows are counted where they arrive: a token with one expert is one row, with gather
// one a rank. What follows a dispatch (combine) is not timed but keeps the ranks in step.
#include <benchmark/benchmark.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "heddle/exchange.hpp"

namespace heddle {
namespace {

constexpr int rows_moved = 4096;
constexpr int hidden = 5120;
constexpr std::size_t row_bytes = hidden * sizeof(bf16);
using Clock = std::chrono::steady_clock;

struct Setting {
  const char* name;
  Way way;
  ArrivedLayout arrived;
  GatherMode gather = GatherMode::padded;
  bool cpu_sync = false;
};

ExchangeOptions options_of(const Setting& setting, int ranks) {
  const int copies = setting.way == Way::gather ? ranks : 1;
  ExchangeOptions options;
  options.way = setting.way;
  options.hidden = hidden;
  options.topk = 1;
  options.cap = rows_moved / ranks / copies;
  options.placement = Placement::contiguous(8, ranks);
  options.wire = Wire::bf16;
  options.arrived = setting.arrived;
  options.gather = setting.gather;
  options.cpu_sync = setting.cpu_sync;
  return options;
}

/// One rank: its tokens, its exchange, and buffers that are touched before anything is timed.
struct Rank {
  ExchangeOptions options;
  std::vector<bf16> rows;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<bf16> out;
  std::vector<std::byte> copy;
  std::unique_ptr<bf16[]> results;
  std::size_t results_room = 0;
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<Exchange> exchange;

  Rank(Group& group, const Setting& setting) : options(options_of(setting, group.ranks())) {
    const auto tokens = static_cast<std::size_t>(options.cap);
    std::mt19937_64 random(static_cast<std::uint64_t>(group.rank()));
    rows.assign(tokens * hidden, to_bf16(1.0f));
    out.assign(tokens * hidden, to_bf16(0.0f));
    copy.assign(rows_moved / static_cast<std::size_t>(group.ranks()) * row_bytes, std::byte{1});
    for (std::size_t t = 0; t < tokens; ++t) ids.push_back(static_cast<std::int32_t>(random() % 8));
    weights.assign(tokens, 1.0f);
    const ExchangeMemory memory = exchange_memory(options);
    workspace = std::make_unique<Workspace>(group, memory.heap_bytes(group.ranks()), describe(options));
    exchange = create_exchange(*workspace, options, memory);
  }

  Arrived dispatch() {
    return exchange->dispatch({options.cap, rows.data(), ids.data(), weights.data(), {}}, {options.cap, Phase::prefill});
  }

  void combine(const Arrived& arrived) {
    const auto room = static_cast<std::size_t>(arrived.room) * hidden;
    if (room > results_room) results = std::make_unique_for_overwrite<bf16[]>(results_room = room);
    exchange->combine(results.get(), {.out = out.data()});
  }

  /// As many bytes as this rank's share of the rows, from the tokens over and over where they are fewer.
  void copy_share() {
    for (std::size_t done = 0; done < copy.size();) {
      const std::size_t bytes = std::min(copy.size() - done, rows.size() * sizeof(bf16));
      std::memcpy(copy.data() + done, rows.data(), bytes);
      done += bytes;
    }
  }
};

/// Seconds; the least of all rounds, since other work on the machine only ever adds.
struct Times {
  double copy = 1e9;
  double dispatch = 1e9;
  double regroup = 0;
  double without_regroup = 1e9;

  void keep_least(const Times& times) {
    copy = std::min(copy, times.copy);
    dispatch = std::min(dispatch, times.dispatch);
    without_regroup = std::min(without_regroup, times.dispatch - times.regroup);
  }
};

/// A rank that is woken would otherwise share the core of the one that woke it for a while.
void keep_to_core(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

double seconds_since(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

void dispatch_rate(benchmark::State& state, const Setting& setting) {
  const auto ranks = static_cast<int>(state.range(0));
  const auto groups = create_thread_group(ranks);
  std::barrier step(ranks);
  std::atomic<bool> go_on = true;
  Times best;
  const auto run = [&](int r) {
    if (ranks <= static_cast<int>(std::thread::hardware_concurrency())) keep_to_core(r);
    Rank rank(*groups[static_cast<std::size_t>(r)], setting);
    const auto round = [&] {
      step.arrive_and_wait();
      auto since = Clock::now();
      rank.copy_share();
      step.arrive_and_wait();
      const double copied = seconds_since(since);
      since = Clock::now();
      const Arrived arrived = rank.dispatch();
      step.arrive_and_wait();
      const Times times{copied, seconds_since(since), arrived.regroup_seconds};
      rank.combine(arrived);
      return times;
    };
    for (int i = 0; i < 2; ++i) round();  // memory that nobody has touched yet costs page faults once
    if (r != 0) {
      for (;;) {
        step.arrive_and_wait();
        if (!go_on) break;
        round();
      }
    } else {
      for (auto _ : state) {
        step.arrive_and_wait();
        const Times times = round();
        best.keep_least(times);
        state.SetIterationTime(times.dispatch);
      }
      go_on = false;
      step.arrive_and_wait();
    }
    rank.workspace->close();
  };
  std::vector<std::thread> others;
  for (int r = 1; r < ranks; ++r) others.emplace_back(run, r);
  cpu_set_t all;
  pthread_getaffinity_np(pthread_self(), sizeof all, &all);
  run(0);
  pthread_setaffinity_np(pthread_self(), sizeof all, &all);
  for (std::thread& other : others) other.join();
  constexpr double gigabytes = static_cast<double>(rows_moved) * static_cast<double>(row_bytes) / 1e9;
  state.counters["GB/s"] = gigabytes / best.dispatch;
  state.counters["memcpy_GB/s"] = gigabytes / best.copy;
  state.counters["of_memcpy"] = best.copy / best.dispatch;
  state.counters["without_regroup"] = best.copy / best.without_regroup;
}

constexpr Setting settings[] = {
    {"gather_padded", Way::gather, ArrivedLayout::routed},
    {"gather_uneven", Way::gather, ArrivedLayout::routed, GatherMode::uneven},
    {"gather_zero_filled", Way::gather, ArrivedLayout::routed, GatherMode::zero_filled},
    {"normal_routed", Way::normal, ArrivedLayout::routed},
    {"normal_contiguous", Way::normal, ArrivedLayout::contiguous},
    {"low_latency", Way::low_latency, ArrivedLayout::masked},
    {"elastic_routed", Way::elastic, ArrivedLayout::routed},
    {"elastic_contiguous", Way::elastic, ArrivedLayout::contiguous},
    {"elastic_contiguous_cpu_sync", Way::elastic, ArrivedLayout::contiguous, GatherMode::padded, true},
    {"one_sided", Way::one_sided, ArrivedLayout::routed},
};

const bool registered = [] {
  for (const Setting& setting : settings) {
    const auto body = [&setting](benchmark::State& state) { dispatch_rate(state, setting); };
    benchmark::RegisterBenchmark((std::string("dispatch/") + setting.name).c_str(), body)
        ->ArgName("ranks")
        ->Arg(1)
        ->Arg(2)
        ->UseManualTime()
        ->Iterations(41)
        ->Unit(benchmark::kMillisecond);
  }
  return true;
}();

}  // namespace
}  // namespace heddle
