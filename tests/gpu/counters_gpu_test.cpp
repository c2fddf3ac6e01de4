// Counters that the host reads while kernels run: equal to what the routing says, and never torn.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stop_token>
#include <thread>

#include "exchange_arrivals.hpp"
#include "gpu/counting.hpp"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
using Count = ExchangeCounters::Count;

/// What the counters of all ranks should be, from the ids alone.
class Expected {
 public:
  explicit Expected(const Case& c) : of_(static_cast<std::size_t>(c.ranks())) {
    for (int rank = 0; rank < c.ranks(); ++rank) {
      ExchangeCounters& mine = of_[static_cast<std::size_t>(rank)];
      mine.sent.resize(of_.size());
      mine.arrived.resize(of_.size());
      mine.experts.resize(c.options.placement.experts_of(rank).size());
    }
  }
  void add(const Case& c, int round, const std::vector<bool>& live) {
    const Round all(c, round);
    for (int rank = 0; rank < c.ranks(); ++rank) {
      if (!is_live(live, rank)) continue;
      ExchangeCounters& mine = of_[static_cast<std::size_t>(rank)];
      ++mine.dispatches;
      ++mine.combines;
      for (int peer = 0; peer < c.ranks(); ++peer) {
        const bool both = is_live(live, peer);
        count(mine.sent[static_cast<std::size_t>(peer)], both ? rows(all, rank, peer) : 0);
        count(mine.arrived[static_cast<std::size_t>(peer)], both ? rows(all, peer, rank) : 0);
      }
      for (std::size_t e = 0; e < mine.experts.size(); ++e) {
        int pairs = 0;
        for (const Landing& row : all.rows_of_expert(c.options.placement.experts_of(rank)[e]))
          pairs += is_live(live, row.source) ? 1 : 0;
        count(mine.experts[e], pairs);
      }
    }
  }
  const ExchangeCounters& of(int rank) const { return of_[static_cast<std::size_t>(rank)]; }
  void check(DeviceRun& run) const {
    for (int rank = 0; rank < run.ranks(); ++rank) {
      SCOPED_TRACE(testing::Message() << "counters of rank " << rank);
      const ExchangeCounters have = counters_of_rank(run, rank);
      const ExchangeCounters& want = of_[static_cast<std::size_t>(rank)];
      EXPECT_EQ(have.dispatches, want.dispatches);
      EXPECT_EQ(have.combines, want.combines);
      same(have.sent, want.sent, "rows sent to rank ");
      same(have.arrived, want.arrived, "rows arrived from rank ");
      same(have.experts, want.experts, "rows of local expert ");
      EXPECT_GE(have.dispatch_wait.sum, have.dispatch_wait.last);
      EXPECT_GE(have.combine_wait.sum, have.combine_wait.last);
    }
  }

 private:
  static int rows(const Round& all, int from, int to) {
    const Case& c = all.the_case();
    if (c.options.way == Way::gather) return c.tokens_of(from);
    return c.options.way == Way::low_latency ? all.pairs(from, to) : all.copies(from, to);
  }
  static void count(Count& to, int rows) {
    to.last = static_cast<std::uint64_t>(rows);
    to.sum += to.last;
  }
  static void same(const std::vector<Count>& have, const std::vector<Count>& want, const char* what) {
    ASSERT_EQ(have.size(), want.size()) << "number of: " << what;
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(have[i].last, want[i].last) << what << i << ", last call";
      EXPECT_EQ(have[i].sum, want[i].sum) << what << i << ", all calls";
    }
  }

  std::vector<ExchangeCounters> of_;
};

/// Every way in every layout that it allows, and gather with the flag beside the data, for steps of up to 16 tokens.
std::vector<Case> every_case(int hidden, int experts, int topk, int cap) {
  std::vector<Case> all;
  for (const ExchangeOptions& options : every_way_on_gpus(hidden, experts, ranks_here(), topk, cap)) {
    for (const auto layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
      if (!allows_layout(options.way, layout)) continue;
      Case c;
      c.options = options;
      c.options.arrived = layout;
      all.push_back(c);
    }
    if (options.way != Way::gather || options.gather != GatherMode::padded) continue;
    all.emplace_back().options = options;
    all.back().options.tagged_tokens = 16;
  }
  return all;
}

std::string label(const Case& c) {
  return title(c.options) + " " + std::string(name(c.options.arrived)) + (c.options.tagged_tokens > 0 ? " tagged" : "");
}

/// A rank without tokens, one with all that fit, and numbers between; others each round.
std::vector<int> batches(int ranks, int round, int most) {
  std::vector<int> tokens;
  for (int r = 0; r < ranks; ++r) tokens.push_back((r + round) % 3 == 1 ? 0 : std::max(1, most - 2 * ((r + round) % 5)));
  tokens[static_cast<std::size_t>(round % ranks)] = most;
  return tokens;
}

TEST(CountersGpu, EqualWhatTheRoutingSays) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (Case c : every_case(128, 13, 4, 40)) {
    SCOPED_TRACE(label(c));
    c.seed = seed;
    DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), counting());
    Expected want(c);
    want.check(run);  // all zero
    for (int round = 0; round < 4 && !testing::Test::HasFailure(); ++round) {
      c.tokens = batches(c.ranks(), round, round == 3 ? 40 : 15);  // clusters, and all CTAs
      round_trip(c, run, round, false, round % 2 == 1, false);
      want.add(c, round, {});
      want.check(run);
    }
    // A reset leaves them as they are; a masked rank sends nothing, gets nothing and counts nothing.
    std::vector<bool> live(static_cast<std::size_t>(c.ranks()), true);
    live[1] = false;
    run.workspace().reset(live);
    want.check(run);
    c.tokens = batches(c.ranks(), 0, 12);
    round_trip(c, run, 9, false, false, false, live);
    want.add(c, 9, live);
    want.check(run);
    if (testing::Test::HasFailure()) return;
  }
}

// So many that all squads of a rank number rows and pairs together, and leave the counts elsewhere.
TEST(CountersGpu, EqualWhatTheRoutingSaysOfManyTokens) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (Case c : every_case(64, 19, 8, 1200)) {
    SCOPED_TRACE(label(c));
    c.seed = seed;
    c.options.queue_rows = 64;
    c.options.chunk_rows = 16;
    c.tokens.assign(static_cast<std::size_t>(c.ranks()), 1200);
    DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), counting());
    Expected want(c);
    for (int round = 0; round < 2; ++round) {
      round_trip(c, run, round, false, round == 1, false);
      want.add(c, round, {});
    }
    want.check(run);
    if (testing::Test::HasFailure()) return;
  }
}

/// Two round trips in a graph a GPU, the first of few tokens, the second of all: what a call counts tells its parity.
class TwoBatches {
 public:
  TwoBatches(DeviceRun& run, const Case& c, int few, int all) : run_(run) {
    room_ = static_cast<std::size_t>(rows_at_most(c)) * static_cast<std::size_t>(c.options.hidden);
    for (int rank = 0; rank < run.ranks(); ++rank) {
      results_.emplace_back(run.device_of(rank), std::vector<bf16>(room_, bf16{0}));
      few_.emplace_back(run.device_of(rank), std::vector<int>{few});
      all_.emplace_back(run.device_of(rank), std::vector<int>{all});
    }
    run.settle();
    for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) capture(c, gpu, all);
  }
  ~TwoBatches() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }
  TwoBatches(const TwoBatches&) = delete;
  TwoBatches& operator=(const TwoBatches&) = delete;

  void replay() {
    for (std::size_t gpu = 0; gpu < graphs_.size(); ++gpu) {
      const cuda::DeviceScope scope(run_.workspace().device(gpu));
      check(cudaGraphLaunch(graphs_[gpu], run_.stream(gpu)), "replay");
    }
  }

 private:
  void queue(const Case& c, std::size_t gpu, const std::vector<Buffer<int>>& tokens, int step) {
    const DeviceWorkspace& workspace = run_.workspace();
    DeviceExchange& exchange = run_.exchange(0, gpu);
    for (int rank = workspace.first_rank(gpu); rank < workspace.first_rank(gpu) + workspace.ranks_on(gpu); ++rank) {
      check(cudaMemcpyAsync(run_.seat(rank).tokens.data(), tokens[static_cast<std::size_t>(rank)].data(), sizeof(int),
                            cudaMemcpyDeviceToDevice, run_.stream(gpu)),
            "number of tokens");
    }
    exchange.dispatch(run_.inputs(gpu), {step, Phase::decode}, run_.stream(gpu));
    for (int local = 0; local < workspace.ranks_on(gpu); ++local) {
      const Arrived arrived = exchange.arrived(local);
      ASSERT_LE(arrived.room * (arrived.slots_wanted ? c.options.topk : 1) * c.options.hidden, static_cast<int>(room_))
          << "results of this test are too small for the way";
    }
    exchange.combine(run_.of_gpu(gpu, DeviceRun::pointers(results_)), run_.outputs(gpu, Shared::none), run_.stream(gpu));
  }
  void capture(const Case& c, std::size_t gpu, int step) {
    const cuda::DeviceScope scope(run_.workspace().device(gpu));
    check(cudaStreamBeginCapture(run_.stream(gpu), cudaStreamCaptureModeRelaxed), "begin of a capture");
    queue(c, gpu, few_, step);
    queue(c, gpu, all_, step);
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(run_.stream(gpu), &graph), "end of a capture");
    cudaGraphExec_t executable = nullptr;
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiation");
    graphs_.push_back(executable);
    check(cudaGraphDestroy(graph), "graph");
    check(cudaGraphUpload(executable, run_.stream(gpu)), "upload of a graph");
    check(cudaStreamSynchronize(run_.stream(gpu)), "upload of a graph");
  }

  DeviceRun& run_;
  std::size_t room_ = 0;
  std::vector<Buffer<bf16>> results_;
  std::vector<Buffer<int>> few_, all_;
  std::vector<cudaGraphExec_t> graphs_;  ///< [GPU]
};

/// Counts of a number of calls, by turns of the one and of the other batch.
void expect_turns(const std::vector<Count>& have, const std::vector<Count>& few, const std::vector<Count>& all, std::uint64_t calls,
                  const char* what) {
  ASSERT_EQ(have.size(), few.size());
  for (std::size_t i = 0; i < have.size(); ++i) {
    EXPECT_EQ(have[i].last, calls == 0 ? 0 : calls % 2 == 1 ? few[i].last : all[i].last) << what << i << " after call " << calls;
    EXPECT_EQ(have[i].sum, (calls + 1) / 2 * few[i].last + calls / 2 * all[i].last) << what << i << " after call " << calls;
  }
}

/// The reader's side of the test below. least_seen: states that it has seen of every rank.
void read_until(const std::stop_token& stop, DeviceRun& run, bool routed, const std::vector<ExchangeCounters>& few,
                const std::vector<ExchangeCounters>& all, std::atomic<std::uint64_t>& least_seen) {
  const std::size_t ranks = few.size();
  std::vector<std::uint64_t> calls(ranks, 0), combines(ranks, 0), seen(ranks, 0);
  while (!stop.stop_requested() && !testing::Test::HasFailure()) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const ExchangeCounters now = counters_of_rank(run, static_cast<int>(rank));
      EXPECT_GE(now.dispatches, calls[rank]) << "dispatches of rank " << rank;
      EXPECT_GE(now.combines, combines[rank]) << "combines of rank " << rank;
      expect_turns(now.sent, few[rank].sent, all[rank].sent, now.dispatches, "rows sent to rank ");
      expect_turns(now.arrived, few[rank].arrived, all[rank].arrived, now.dispatches, "rows arrived from rank ");
      expect_turns(now.experts, few[rank].experts, all[rank].experts, routed ? now.combines : now.dispatches,
                   "rows of local expert ");
      seen[rank] += now.dispatches != calls[rank] ? 1 : 0;
      calls[rank] = now.dispatches;
      combines[rank] = now.combines;
    }
    least_seen = *std::min_element(seen.begin(), seen.end());
  }
}

// From another thread, again and again: calls only go up, and every count is that of the very call that was read.
TEST(CountersGpu, ReadWhileGraphsReplay) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  constexpr std::uint64_t states = 200;  // that the reader is to see, of each rank
  for (Case c : every_case(64, 13, 4, 16)) {
    if (c.options.way == Way::normal) continue;
    SCOPED_TRACE(label(c));
    c.seed = seed;
    const auto ranks = static_cast<std::size_t>(c.ranks());
    DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), counting());
    c.tokens.assign(ranks, 16);
    for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(c, rank, 0));
    run.settle();
    // What both batches count: the larger one by its ids, the smaller one, the first five tokens of the same, by the sum.
    TwoBatches trips(run, c, 5, 16);
    trips.replay();
    run.wait();
    Expected larger(c);
    larger.add(c, 0, {});
    std::vector<ExchangeCounters> few, all;
    for (int rank = 0; rank < c.ranks(); ++rank) {
      all.push_back(larger.of(rank));
      few.push_back(counters_of_rank(run, rank));
      for (auto* counts : {&few.back().sent, &few.back().arrived, &few.back().experts}) {
        for (Count& count : *counts) count.last = count.sum - count.last;
      }
    }
    std::atomic<std::uint64_t> least_seen{0};
    std::jthread reader([&](const std::stop_token& stop) {
      try {
        read_until(stop, run, c.options.arrived == ArrivedLayout::routed, few, all, least_seen);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "reading threw: " << error.what();
      }
      least_seen = states;
    });
    std::uint64_t replays = 1;
    const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
    while (least_seen < states && Clock::now() < end) {
      for (int i = 0; i < 8; ++i, ++replays) trips.replay();
      run.wait();
    }
    EXPECT_GE(least_seen.load(), states) << "the reader saw too few states within a minute, " << replays << " replays";
    reader.request_stop();
    reader.join();
    for (int rank = 0; rank < c.ranks(); ++rank) {
      const ExchangeCounters last = counters_of_rank(run, rank);
      EXPECT_EQ(last.dispatches, 2 * replays) << "rank " << rank;
      EXPECT_EQ(last.combines, 2 * replays) << "rank " << rank;
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(CountersGpu, RefusedByName) {
  SKIP_WITHOUT_GPU();
  Case c;
  c.options = options_for(Way::low_latency, 128, 12, ranks_here(), 3, 8);
  const auto expect_refused = [](DeviceExchange& exchange, int local, const char* word) {
    try {
      exchange.counters(local);
      ADD_FAILURE() << "counters of local rank " << local << " were read";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  DeviceRun plain(c, gpus_here());
  expect_refused(plain.exchange(0, 0), 0, "DeviceExchangeOptions::counters");
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), counting());
  expect_refused(run.exchange(0, 0), -1, "local rank -1");
  expect_refused(run.exchange(0, 0), run.workspace().ranks_on(0), "local rank");
}

}  // namespace
}  // namespace heddle
