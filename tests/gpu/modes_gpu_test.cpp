// Modes that the other programs leave out: elastic whose host waits for the count (cpu_sync), outputs of all ranks for all
// ranks behind every way, and gather under tensor-parallel attention. Arrivals against the host engine, outputs against what
// must come home, bit for bit.
#include <cuda_runtime.h>

#include "gpu/modes.hpp"

namespace heddle {
namespace {

using cuda::check;

/// At least `ranks` of them, and one a GPU.
int at_least(int ranks) { return std::max(ranks, gpus_here()); }

Case case_of(const ExchangeOptions& options, std::vector<int> tokens) {
  Case c;
  c.options = options;
  c.tokens.assign(static_cast<std::size_t>(c.ranks()), 0);
  for (std::size_t rank = 0; rank < c.tokens.size(); ++rank) c.tokens[rank] = tokens[rank % tokens.size()];
  return c;
}

ExchangeOptions tensor_parallel(int hidden, int experts, int ranks, int topk, int cap) {
  ExchangeOptions options = options_for(Way::gather, hidden, experts, ranks, topk, cap);
  options.gather = GatherMode::tensor_parallel;
  return options;
}

ExchangeOptions waiting_elastic(int hidden, int experts, int ranks, int topk, int cap) {
  ExchangeOptions options = options_for(Way::elastic, hidden, experts, ranks, topk, cap);
  options.cpu_sync = true;
  return options;
}

/// Four rounds: halves and whole, every kind of shared expert.
void play_rounds(const Case& c, bool all_outputs) {
  Modes modes(c);
  for (int round = 0; round < 4; ++round) {
    const Shared shared = round == 1 ? Shared::rows : (round == 2 ? Shared::gated : Shared::none);
    modes.round_trip(round, {round % 2 == 1, all_outputs && round != 3, shared, {}});
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// A rank is masked, and comes back.
void mask_a_rank(const Case& c) {
  Modes modes(c);
  std::vector<bool> survivors(static_cast<std::size_t>(c.ranks()), true);
  modes.round_trip(0, {false, true, Shared::none, {}});
  if (testing::Test::HasFatalFailure()) return;
  survivors[1] = false;
  modes.run().workspace().reset(survivors);
  for (int round = 1; round < 4; ++round) {
    modes.round_trip(round, {round == 2, true, Shared::rows, survivors});
    if (testing::Test::HasFatalFailure()) return;
  }
  modes.run().workspace().reset(std::vector<bool>(survivors.size(), true));
  modes.round_trip(4, {false, true, Shared::none, {}});
}

void delay_verbs(const Case& c, bool all_outputs) {
  const std::uint64_t seed = test_seed();
  Modes modes(c);
  for (int round = 0; round < longer(20); ++round) {
    modes.run().workspace().set_delays(std::chrono::microseconds(20),
                                       static_cast<std::uint32_t>(seed) + static_cast<std::uint32_t>(round));
    modes.round_trip(round, {round % 2 == 1, all_outputs, Shared::none, {}});
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// Combine is captured and replayed with what other rounds' experts gave.
void replay_combine(const Case& c) {
  Modes modes(c);
  const ModeTrip trip{false, true, Shared::gated, {}};
  modes.round_trip(0, trip);
  if (testing::Test::HasFatalFailure()) return;
  std::vector<cudaGraphExec_t> graphs;
  for (std::size_t gpu = 0; gpu < modes.run().workspace().gpus(); ++gpu) {
    const cuda::DeviceScope scope(modes.run().workspace().device(gpu));
    cudaStream_t stream = modes.run().stream(gpu);
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
    modes.combine_on(gpu, modes.outputs(gpu, trip), false);
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "end of capture");
    check(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
  }
  for (int round = 1; round < 5 && !testing::Test::HasFatalFailure(); ++round) {
    modes.dispatch(round, trip);
    if (testing::Test::HasFatalFailure()) break;
    for (std::size_t gpu = 0; gpu < graphs.size(); ++gpu) {
      const cuda::DeviceScope scope(modes.run().workspace().device(gpu));
      check(cudaGraphLaunch(graphs[gpu], modes.run().stream(gpu)), "replay");
    }
    modes.run().wait();
    modes.expect_outputs(round, trip);
  }
  for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph), "graph");
}

TEST(WaitingElasticGpu, ArrivalsAreExact) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2, 4, 16}) {
    if (ranks < gpus_here()) continue;
    for (const ArrivedLayout layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
      for (const Reduce reduce : {Reduce::rank, Reduce::home}) {
        for (const Wire wire : {Wire::bf16, Wire::fp8}) {
          ExchangeOptions options = waiting_elastic(256, 19, ranks, 4, 40);
          options.arrived = layout;
          options.reduce = reduce;
          options.wire = options.combine_wire = wire;
          SCOPED_TRACE(testing::Message() << describe(options) << ranks << " ranks");
          play_rounds(case_of(options, {17, 0, 40, 5}), false);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Memory grows from call to call and is then kept: batches of very different sizes, up and down.
TEST(WaitingElasticGpu, SizesInAnyOrder) {
  SKIP_WITHOUT_GPU();
  Case c = case_of(waiting_elastic(128, 12, at_least(4), 3, 700), {700});
  DeviceRun run(c, gpus_here());
  const std::uint64_t seed = test_seed();
  int round = 0;
  for (const int tokens : {0, 3, 700, 1, 64, 699, 0, 130}) {
    c.tokens.assign(c.tokens.size(), tokens);
    c.seed = seed + static_cast<std::uint64_t>(round);
    SCOPED_TRACE(testing::Message() << tokens << " tokens a rank");
    round_trip(c, run, round++, true, true, true);
    if (HasFatalFailure()) return;
  }
}

TEST(WaitingElasticGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  mask_a_rank(case_of(waiting_elastic(128, 10, at_least(4), 3, 9), {6, 4, 0, 9}));
}

TEST(WaitingElasticGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPU();
  delay_verbs(case_of(waiting_elastic(128, 12, at_least(4), 3, 9), {9, 0, 5, 8}), false);
}

TEST(WaitingElasticGpu, RefusesACapture) {
  SKIP_WITHOUT_GPU();
  Modes modes(case_of(waiting_elastic(128, 12, at_least(2), 3, 9), {9}));
  DeviceRun& run = modes.run();
  {
    const cuda::DeviceScope scope(run.workspace().device(0));
    check(cudaStreamBeginCapture(run.stream(0), cudaStreamCaptureModeRelaxed), "capture");
    for (const bool receive : {false, true}) {
      try {
        if (receive) {
          run.exchange(0, 0).dispatch_receive(run.stream(0));
        } else {
          run.exchange(0, 0).dispatch_send(run.inputs(0), {9, Phase::decode}, run.stream(0));
        }
        ADD_FAILURE() << (receive ? "dispatch_receive" : "dispatch_send") << " was captured";
      } catch (const InputError& error) {
        EXPECT_NE(std::string(error.what()).find("elastic with cpu_sync cannot be captured"), std::string::npos) << error.what();
      }
    }
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(run.stream(0), &graph), "end of capture");
    check(cudaGraphDestroy(graph), "graph");
  }
  for (int round = 0; round < 3 && !HasFatalFailure(); ++round) modes.round_trip(round, {});
}

TEST(AllOutputsGpu, BehindEveryWay) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2, 4, 16}) {
    if (ranks < gpus_here()) continue;
    for (ExchangeOptions options : every_way_on_gpus(256, 19, ranks, 4, 17)) {
      SCOPED_TRACE(testing::Message() << title(options) << ", " << ranks << " ranks");
      if (ranks == 4) options.wire = options.combine_wire = Wire::fp8;
      play_rounds(case_of(options, {17, 0, 11, 5}), true);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(AllOutputsGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  for (const ExchangeOptions& options : every_way_on_gpus(128, 10, at_least(4), 3, 9)) {
    SCOPED_TRACE(title(options));
    mask_a_rank(case_of(options, {6, 4, 0, 9}));
    if (HasFatalFailure()) return;
  }
}

TEST(AllOutputsGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPU();
  for (const Way way : {Way::low_latency, Way::one_sided}) {
    delay_verbs(case_of(options_for(way, 128, 12, at_least(4), 3, 9), {9, 0, 5, 8}), true);
    if (HasFatalFailure()) return;
  }
}

TEST(AllOutputsGpu, CanBeCaptured) {
  SKIP_WITHOUT_GPU();
  for (const Way way : {Way::gather, Way::low_latency, Way::elastic, Way::one_sided}) {
    SCOPED_TRACE(name(way));
    replay_combine(case_of(options_for(way, 128, 12, at_least(4), 3, 70), {9, 0, 5, 70}));
    if (HasFatalFailure()) return;
  }
}

// What the host can see of a wrong slice is an InputError before anything is launched, and the call can be made again.
TEST(AllOutputsGpu, SlicesThatDoNotFitAreRefused) {
  SKIP_WITHOUT_GPU();
  Modes modes(case_of(options_for(Way::low_latency, 128, 12, at_least(2 * gpus_here()), 3, 9), {9, 5}));
  const ModeTrip trip{false, true, Shared::none, {}};
  modes.dispatch(0, trip);
  const auto refused = [&](auto change, const std::string& part) {
    std::vector<DeviceOutput> outputs = modes.outputs(0, trip);
    change(outputs[1]);
    try {
      modes.combine_on(0, outputs, false);
      ADD_FAILURE() << "accepted; it should say \"" << part << "\"";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused([](DeviceOutput& output) { output.all_out = nullptr; }, "rank 1 does not want all outputs, rank 0 does");
  refused([](DeviceOutput& output) { output.first = -1; }, "from row -1 on");
  refused([](DeviceOutput& output) { output.all_tokens = 9 * 32 * 32 + 1; }, "do not fit a batch");
  refused([](DeviceOutput& output) { output.first = output.all_tokens + 1; }, "do not fit a batch");
  modes.combine(trip);
  modes.run().wait();
  modes.expect_outputs(0, trip);
}

// What only the GPU can see is a named fault, and a reset heals.
TEST(AllOutputsGpu, TokensBehindTheBatchAreAFault) {
  SKIP_WITHOUT_GPU();
  Modes modes(case_of(options_for(Way::elastic, 128, 12, at_least(2), 3, 9), {9, 5}), std::chrono::seconds(3));
  const ModeTrip trip{false, true, Shared::none, {}};
  const int all = modes.all_tokens();
  modes.dispatch(0, trip);
  for (std::size_t gpu = 0; gpu < modes.run().workspace().gpus(); ++gpu) {
    std::vector<DeviceOutput> outputs = modes.outputs(gpu, trip);
    if (gpu == 0) outputs[0].first = all - 8;
    modes.combine_on(gpu, outputs, false);
  }
  try {
    modes.run().wait();
    ADD_FAILURE() << "rank 0 wrote behind the batch";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().phase, "input check") << error.what();
    EXPECT_EQ(error.fault().rank, 0) << error.what();
    EXPECT_EQ(error.fault().expected, static_cast<std::uint64_t>(all)) << error.what();
    EXPECT_EQ(error.fault().seen, static_cast<std::uint64_t>(all + 1)) << error.what();
  }
  modes.run().workspace().reset();
  for (int round = 1; round < 3 && !HasFatalFailure(); ++round) modes.round_trip(round, trip);
}

// Who does not want all outputs does not send its own: the others miss it, by name.
TEST(AllOutputsGpu, AGpuThatDoesNotShareIsNamed) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  Modes modes(case_of(options_for(Way::low_latency, 128, 12, gpus_here(), 3, 9), {9, 5}), std::chrono::milliseconds(500));
  const ModeTrip trip{false, true, Shared::none, {}};
  modes.dispatch(0, trip);
  for (std::size_t gpu = 0; gpu < modes.run().workspace().gpus(); ++gpu)
    modes.combine_on(gpu, modes.outputs(gpu, {false, gpu != 1, Shared::none, {}}), false);
  try {
    modes.run().wait();
    ADD_FAILURE() << "nobody missed rank 1";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().peer, 1) << error.what();
    EXPECT_EQ(error.fault().phase, "all-gather of the outputs") << error.what();
  }
  modes.run().workspace().reset();
  for (int round = 1; round < 3 && !HasFatalFailure(); ++round) modes.round_trip(round, trip);
}

TEST(TensorParallelGpu, OnVirtualRanks) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2, 3, 4, 16, 32}) {
    if (ranks < gpus_here()) continue;
    for (const int tokens : {0, 1, 17 * ranks - 1, 17 * ranks}) {  // every rank brings the whole batch
      for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
        ExchangeOptions options = tensor_parallel(256, 19, ranks, 4, 17);
        options.wire = wire;
        if (tokens % 2 == 1) options.combine_wire = wire;
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << tokens << " tokens, wire " << static_cast<int>(wire));
        play_rounds(case_of(options, {tokens}), true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(TensorParallelGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  mask_a_rank(case_of(tensor_parallel(128, 10, at_least(4), 3, 9), {31}));
}

TEST(TensorParallelGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPU();
  delay_verbs(case_of(tensor_parallel(128, 12, at_least(4), 3, 9), {29}), true);
}

TEST(TensorParallelGpu, CanBeCaptured) {
  SKIP_WITHOUT_GPU();
  for (const int tokens : {3, 70}) {
    replay_combine(case_of(tensor_parallel(128, 12, at_least(4), 3, 70), {tokens}));
    if (HasFatalFailure()) return;
  }
}

TEST(TensorParallelGpu, RefusesToHaveNoPlaceForOutputs) {
  SKIP_WITHOUT_GPU();
  Modes modes(case_of(tensor_parallel(128, 12, at_least(2), 3, 9), {9}));
  const ModeTrip trip{};
  modes.dispatch(0, trip);
  std::vector<DeviceOutput> outputs = modes.outputs(0, trip);
  outputs[0].all_out = nullptr;
  EXPECT_THROW(modes.combine_on(0, outputs, false), InputError);
  modes.combine(trip);
  modes.run().wait();
  modes.expect_outputs(0, trip);
  EXPECT_THROW(modes.run().send({9 * modes.the_case().ranks() + 1, Phase::decode}), InputError);
}

}  // namespace
}  // namespace heddle
