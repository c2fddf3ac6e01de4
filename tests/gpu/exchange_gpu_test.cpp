// The five ways on GPUs against what must come home, and against the host engine: rows, scales, routing,
// placement and outputs bit for bit. Virtual ranks share a GPU; HEDDLE_GPUS sets how many GPUs are used.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "gpu/device_run.hpp"

namespace heddle {
namespace {

using cuda::check;

bool on_gpus(const ExchangeOptions& options) {
  return !(options.way == Way::gather && options.gather == GatherMode::tensor_parallel) && !options.cpu_sync;
}

TEST(ExchangeGpu, EveryWayOnVirtualRanks) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2, 4, 8, 16, 32}) {
    if (ranks < gpus_here()) continue;
    for (ExchangeOptions options : every_way(256, 19, ranks, 4, 17)) {
      if (!on_gpus(options)) continue;
      SCOPED_TRACE(testing::Message() << title(options) << ", " << ranks << " ranks");
      Case c;
      c.options = options;
      for (int r = 0; r < ranks; ++r) c.tokens.push_back(r % 3 == 1 ? 0 : 17 - r % 5);
      DeviceRun run(c, gpus_here());
      for (int round = 0; round < 3; ++round) {
        round_trip(c, run, round, round == 0, round == 1, round == 2);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(ExchangeGpu, RandomShapes) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(test_seed());
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  for (int i = 0; i < 100; ++i) {
    const Way way = all_ways[i % 5];
    const int ranks = std::max(gpus_here(), pick(1, 2, 3, 5, 8));
    const int experts = pick(1, 3, 8, 16, 40);
    const int cap = pick(1, 5, 33, 70);
    Case c;
    c.options = options_for(way, pick(64, 320, 640, 2304, 2880, 7168), experts, ranks,
                            static_cast<int>(1 + random() % static_cast<std::uint64_t>(std::min(experts, 16))), cap);
    if (pick(0, 1) == 1) {
      std::vector<int> map;
      for (int e = 0; e < experts; ++e) map.push_back(static_cast<int>(random() % static_cast<std::uint64_t>(ranks)));
      c.options.placement = Placement::from_map(map, ranks);
    }
    c.options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.combine_wire = pick(Wire::bf16, Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.quantisation = {pick(128, 32), pick(ScaleFormat::ue8m0, ScaleFormat::f32)};
    c.options.weight_at = pick(WeightAt::activation, WeightAt::combine);
    if (way == Way::elastic) c.options.reduce = pick(Reduce::rank, Reduce::home);
    if (way == Way::gather) c.options.gather = pick(GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled);
    if (way == Way::normal || way == Way::elastic) {
      c.options.arrived = pick(ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed);
    }
    c.options.queue_rows = pick(1, 4, 64);
    c.options.chunk_rows = std::min(c.options.queue_rows, pick(1, 3));
    c.none = pick(0.0, 0.1, 0.6);
    c.hot = pick(0, 0, 0, 1) == 1 ? static_cast<int>(random() % static_cast<std::uint64_t>(ranks)) : -1;
    for (int r = 0; r < ranks; ++r) {
      c.tokens.push_back(pick(0, 1) == 1 ? cap : static_cast<int>(random() % static_cast<std::uint64_t>(cap + 1)));
    }
    c.seed = random() % 100000;
    SCOPED_TRACE(testing::Message() << i << ": " << title(c.options) << ", " << ranks << " ranks\n" << describe(c.options));
    DeviceRun run(c, gpus_here());
    for (int round = 0; round < 2; ++round) {
      round_trip(c, run, round, round == 0, round == 1, round == 1);
      if (HasFatalFailure()) return;
    }
  }
}

// gather and one_sided let the experts write where peers pull; combine then announces at once and moves nothing.
TEST(ExchangeGpu, ResultsMadeInPlace) {
  SKIP_WITHOUT_GPU();
  int offered = 0;
  for (const int ranks : {2, 5}) {
    for (const ExchangeOptions& options : every_way(256, 10, ranks, 3, 24)) {
      if (!on_gpus(options)) continue;
      SCOPED_TRACE(testing::Message() << title(options) << ", " << ranks << " ranks");
      Case c;
      c.options = options;
      for (int r = 0; r < ranks; ++r) c.tokens.push_back(r == 1 ? 0 : 24 - r);
      DeviceRun run(c, gpus_here());
      for (int round = 0; round < 4; ++round) {
        const bool in_place = round_trip_in_place(c, run, round);
        if (HasFatalFailure()) return;
        const bool has_place = options.way == Way::gather || options.way == Way::one_sided;
        ASSERT_EQ(in_place, has_place && options.combine_wire == Wire::bf16);
        if (!in_place) break;
        ++offered;
      }
    }
  }
  EXPECT_GT(offered, 0);
}

// Before anything is launched; what is captured, or may follow a replay, is taken on trust (graphs are other tests' matter).
TEST(ExchangeGpu, CombineWithoutADispatchIsNamed) {
  SKIP_WITHOUT_GPU();
  const int ranks = std::max(2, gpus_here());
  for (const ExchangeOptions& options : every_way(128, 10, ranks, 3, 9)) {
    if (!on_gpus(options)) continue;
    SCOPED_TRACE(title(options));
    Case c;
    c.options = options;
    c.tokens.assign(static_cast<std::size_t>(ranks), 7);
    DeviceRun run(c, gpus_here());
    const std::vector<const bf16*> results(static_cast<std::size_t>(ranks), run.seat(0).hidden.data());
    const auto expect_refused = [&](const char* when) {
      for (const bool fused : {true, false}) {
        try {
          run.combine(results, false, fused);
          ADD_FAILURE() << "accepted " << when;
        } catch (const InputError& error) {
          EXPECT_NE(std::string(error.what()).find("combine without a dispatch before it"), std::string::npos) << error.what();
        }
      }
    };
    expect_refused("before the first dispatch");
    for (int round = 0; round < 2; ++round) {
      round_trip(c, run, round, false, round == 1, false);
      if (HasFatalFailure()) return;
      expect_refused("after a combine");
    }
  }
}

TEST(ExchangeGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (ExchangeOptions options : every_way(128, 12, 4, 3, 9)) {
    if (!on_gpus(options)) continue;
    SCOPED_TRACE(title(options));
    Case c;
    c.options = options;
    c.tokens = {9, 0, 5, 8};
    DeviceRun run(c, gpus_here());
    for (int round = 0; round < 20; ++round) {
      run.workspace().set_delays(std::chrono::microseconds(20),
                                 static_cast<std::uint32_t>(seed) + static_cast<std::uint32_t>(round));
      round_trip(c, run, round, false, round % 2 == 1, false);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ExchangeGpu, BadIdsAreAFaultAndAResetHeals) {
  SKIP_WITHOUT_GPU();
  for (ExchangeOptions options : every_way(128, 8, 4, 3, 9)) {
    if (!on_gpus(options)) continue;
    SCOPED_TRACE(title(options));
    Case c;
    c.options = options;
    c.tokens = {4, 4, 4, 4};
    c.none = 0;
    DeviceRun run(c, gpus_here(), std::chrono::milliseconds(1500));
    round_trip(c, run, 0, false, false, false);
    RankData bad = draw(c, 2, 1);
    bad.ids[5] = 8;
    for (int rank = 0; rank < 4; ++rank) run.load(rank, rank == 2 ? bad : draw(c, rank, 1));
    run.settle();
    try {
      run.dispatch({9, Phase::decode}, false);
      run.wait();
      ADD_FAILURE() << "id 8 of 8 experts was accepted";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().rank, 2);
      EXPECT_EQ(error.fault().expected, 8u);
      EXPECT_EQ(error.fault().seen, 8u);
    }
    run.workspace().reset();
    for (int round = 2; round < 4; ++round) {
      round_trip(c, run, round, false, false, false);
      if (HasFatalFailure()) return;
    }
  }
}

// The host masks a rank: the others neither send to it nor wait for it, and its experts contribute nothing.
TEST(ExchangeGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  const std::vector<bool> survivors{true, false, true, true};
  for (ExchangeOptions options : every_way(128, 10, 4, 3, 9)) {
    if (!on_gpus(options)) continue;
    SCOPED_TRACE(title(options));
    Case c;
    c.options = options;
    c.tokens = {6, 4, 0, 9};
    DeviceRun run(c, gpus_here());
    round_trip(c, run, 0, false, false, false);
    run.workspace().reset(survivors);
    for (int round = 1; round < 4; ++round) {
      round_trip(c, run, round, false, false, false, survivors);
      if (HasFatalFailure()) return;
    }
    run.workspace().reset({true, true, true, true});
    round_trip(c, run, 4, false, false, false);
    if (HasFatalFailure()) return;
  }
}

// A GPU whose kernels do not come, in dispatch or in combine: the others' waits end at the deadline with its
// rank in the error, the context stays healthy, and after a reset the next calls are right.
TEST(ExchangeGpu, ASilentGpuIsNamedAndAResetHeals) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  const std::chrono::milliseconds deadline(300);
  for (ExchangeOptions options : every_way(128, 10, 2, 3, 9)) {
    if (!on_gpus(options)) continue;
    for (const bool in_dispatch : {true, false}) {
      SCOPED_TRACE(testing::Message() << title(options) << (in_dispatch ? ", silent in dispatch" : ", silent in combine"));
      Case c;
      c.options = options;
      c.tokens = {6, 9};
      DeviceRun run(c, 2, deadline);
      round_trip(c, run, 0, false, false, false);
      for (int rank = 0; rank < 2; ++rank) run.load(rank, draw(c, rank, 1));
      run.settle();
      const auto since = std::chrono::steady_clock::now();
      try {
        const Step step{c.most_tokens(), Phase::decode};
        if (in_dispatch) {
          run.dispatch_on(0, step);
        } else {
          run.dispatch(step, false);
          run.wait();
          const auto results = results_of(c, run, nullptr);
          run.settle();
          run.combine_on(0, results);
        }
        run.wait();
        ADD_FAILURE() << "GPU 0 did not miss GPU 1";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().rank, 0);
        EXPECT_EQ(error.fault().peer, 1);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - since, 2 * deadline + std::chrono::seconds(1));
      run.workspace().reset();
      for (int round = 2; round < 4; ++round) {
        round_trip(c, run, round, false, false, false);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(ExchangeGpu, GraphsReplayWithOtherTokens) {
  SKIP_WITHOUT_GPU();
  for (ExchangeOptions options : every_way(256, 16, std::max(2, gpus_here()), 4, 24)) {
    if (!on_gpus(options) || options.way == Way::normal) continue;
    SCOPED_TRACE(title(options));
    Case c;
    c.options = options;
    c.tokens.assign(static_cast<std::size_t>(c.ranks()), 24);
    DeviceRun run(c, gpus_here());
    // A dispatch a GPU is captured once; the routing, the rows and the number of tokens change between replays.
    std::vector<cudaGraphExec_t> graphs;
    for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) {
      const cuda::DeviceScope scope(run.workspace().device(gpu));
      check(cudaStreamBeginCapture(run.stream(gpu), cudaStreamCaptureModeRelaxed), "capture");
    }
    run.dispatch_fused({24, Phase::decode});
    for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) {
      const cuda::DeviceScope scope(run.workspace().device(gpu));
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(run.stream(gpu), &graph), "end of capture");
      cudaGraphExec_t executable = nullptr;
      check(cudaGraphInstantiate(&executable, graph, 0), "instantiation");
      check(cudaGraphDestroy(graph), "graph");
      graphs.push_back(executable);
    }
    for (int round = 0; round < 12; ++round) {
      Case now = c;
      for (std::size_t r = 0; r < now.tokens.size(); ++r) now.tokens[r] = (round * 7 + static_cast<int>(r) * 5) % 25;
      now.tokens[0] = 24;  // the step's largest batch was fixed at capture
      for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(now, rank, round));
      run.settle();
      for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) check(cudaGraphLaunch(graphs[gpu], run.stream(gpu)), "replay");
      run.wait();
      const auto results = results_of(now, run, nullptr);
      std::vector<const bf16*> pointers;
      for (const auto& buffer : results) pointers.push_back(buffer.data());
      run.settle();
      run.combine(pointers, false, true);
      run.wait();
      expect_outputs(now, run, round, false);
      if (HasFatalFailure()) return;
    }
    for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph), "graph");
  }
}

}  // namespace
}  // namespace heddle
