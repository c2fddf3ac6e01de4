// Modes that the other programs leave out: elastic whose host waits for the count (cpu_sync), outputs of all ranks for all
// ranks behind every way, and gather under tensor-parallel attention. Arrivals against the host engine, outputs against what
// must come home, bit for bit.
#include <cuda_runtime.h>

#include "gpu/device_run.hpp"

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

struct Trip {
  bool halves = false;
  bool all_outputs = false;  ///< always so under tensor-parallel attention
  Shared shared = Shared::none;
  std::vector<bool> live;  ///< empty: all
};

/// A case on this machine's GPUs, with room a rank for the outputs of all.
class Modes {
 public:
  explicit Modes(const Case& c, std::chrono::milliseconds deadline = std::chrono::seconds(20))
      : c_(c), run_(c, gpus_here(), deadline) {
    for (int rank = 0; rank < c.ranks(); ++rank) {
      all_out_.emplace_back(run_.device_of(rank), static_cast<std::size_t>(all_tokens()) * hidden());
      results_.emplace_back(run_.device_of(rank), std::size_t{0});
    }
  }

  DeviceRun& run() { return run_; }
  const Case& the_case() const { return c_; }
  int all_tokens() const { return c_.tensor_parallel() ? c_.tokens[0] : first_row(c_.ranks()); }
  Step step() const { return {c_.most_tokens(), Phase::decode}; }

  std::vector<DeviceOutput> outputs(std::size_t gpu, const Trip& trip) const {
    std::vector<DeviceOutput> all = run_.outputs(gpu, trip.shared);
    for (std::size_t local = 0; local < all.size(); ++local) {
      const int rank = run_.first_rank(gpu) + static_cast<int>(local);
      if (c_.tensor_parallel()) all[local].out = nullptr;  // it is ignored
      if (!trip.all_outputs && !c_.tensor_parallel()) continue;
      all[local].all_out = all_out_[static_cast<std::size_t>(rank)].data();
      all[local].first = first_row(rank);
      all[local].all_tokens = all_tokens();
    }
    return all;
  }
  std::vector<const bf16*> results(std::size_t gpu) const { return run_.of_gpu(gpu, DeviceRun::pointers(results_)); }

  /// Everything up to the experts' results, which are kept for combine.
  void dispatch(int round, const Trip& trip) {
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      run_.load(rank, draw(c_, rank, round));
      all_out_[static_cast<std::size_t>(rank)].poison();
    }
    run_.settle();
    if (trip.halves || c_.options.cpu_sync || c_.options.way == Way::normal) {
      run_.dispatch(step(), false);
    } else {
      run_.dispatch_fused(step());
    }
    run_.wait();
    if (!trip.live.empty()) {
      results_of_arrivals(nullptr, trip.live);
      return;
    }
    const std::vector<HostArrived> host = host_arrivals(c_, round);
    results_of_arrivals(&host, trip.live);
    if (c_.options.cpu_sync) expect_exact_room(host);
  }
  void combine(const Trip& trip) {
    for (std::size_t gpu = 0; gpu < run_.workspace().gpus(); ++gpu) combine_on(gpu, outputs(gpu, trip), trip.halves);
  }
  void combine_on(std::size_t gpu, const std::vector<DeviceOutput>& outputs, bool halves) {
    DeviceExchange& exchange = run_.exchange(0, gpu);
    if (halves) {
      exchange.combine_send(results(gpu), run_.stream(gpu));
      exchange.combine_receive(outputs, run_.stream(gpu));
    } else {
      exchange.combine(results(gpu), outputs, run_.stream(gpu));
    }
  }
  void expect_outputs(int round, const Trip& trip) const {
    std::vector<std::vector<bf16>> want;  // of each rank; under tensor-parallel attention of the batch
    for (int rank = 0; rank < (c_.tensor_parallel() ? 1 : c_.ranks()); ++rank)
      want.push_back(expected(c_, draw(c_, rank, round), trip.live, trip.shared));
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      if (!is_live(trip.live, rank)) continue;
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", round " << round);
      run_.seat(rank).expect_guards("rank " + std::to_string(rank));
      if (!c_.tensor_parallel()) {
        const std::vector<bf16>& own = want[static_cast<std::size_t>(rank)];
        ASSERT_EQ(differences(own, read(run_.seat(rank).out.data(), own.size()).data()), 0);
        if (!trip.all_outputs) continue;
      }
      const Buffer<bf16>& all = all_out_[static_cast<std::size_t>(rank)];
      all.expect_guards("outputs of all ranks");
      const std::vector<bf16> have = all.read();
      for (std::size_t source = 0; source < want.size(); ++source) {
        const int from = static_cast<int>(source);
        if (!c_.tensor_parallel() && !is_live(trip.live, from)) continue;
        ASSERT_EQ(differences(want[source], have.data() + static_cast<std::size_t>(first_row(from)) * hidden()), 0)
            << "outputs of rank " << source;
      }
    }
  }
  void round_trip(int round, const Trip& trip) {
    dispatch(round, trip);
    if (testing::Test::HasFatalFailure()) return;
    combine(trip);
    run_.wait();
    expect_outputs(round, trip);
  }

 private:
  std::size_t hidden() const { return static_cast<std::size_t>(c_.options.hidden); }
  int first_row(int rank) const {
    int first = 0;
    for (int r = 0; r < rank && !c_.tensor_parallel(); ++r) first += c_.tokens_of(r);
    return first;
  }
  /// Into the same memory as before where that suffices, so that a captured combine finds it.
  void results_of_arrivals(const std::vector<HostArrived>* host, const std::vector<bool>& live) {
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      if (!is_live(live, rank)) continue;
      const HostArrived arrived = run_.arrived(rank);
      if (host != nullptr) expect_same_arrival(c_, arrived, (*host)[static_cast<std::size_t>(rank)]);
      if (testing::Test::HasFatalFailure()) return;
      const std::vector<bf16> values = run_experts(c_, arrived.view, rank);
      keep_results(static_cast<std::size_t>(rank), values);
    }
    run_.settle();
  }
  void keep_results(std::size_t rank, const std::vector<bf16>& values) {
    if (values.size() <= results_[rank].size()) {
      results_[rank].write(values);
      return;
    }
    std::vector<Buffer<bf16>> grown;
    for (std::size_t r = 0; r < results_.size(); ++r) {
      if (r == rank) {
        grown.emplace_back(run_.device_of(static_cast<int>(r)), values);
      } else {
        grown.push_back(std::move(results_[r]));
      }
    }
    results_ = std::move(grown);
  }
  void expect_exact_room(const std::vector<HostArrived>& host) const {
    for (int rank = 0; rank < c_.ranks(); ++rank) {
      const std::size_t gpu = run_.gpu_of(rank);
      const Arrived there = run_.exchange(0, gpu).arrived(rank - run_.first_rank(gpu));
      const Arrived& want = host[static_cast<std::size_t>(rank)].view;
      EXPECT_TRUE(there.host_waited) << "rank " << rank;
      EXPECT_EQ(there.received, want.received) << "rank " << rank;
      EXPECT_EQ(there.room, want.room) << "rank " << rank;
    }
  }

  Case c_;
  DeviceRun run_;
  std::vector<Buffer<bf16>> all_out_, results_;
};

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
  const Trip trip{false, true, Shared::gated, {}};
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
  const Trip trip{false, true, Shared::none, {}};
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
  const Trip trip{false, true, Shared::none, {}};
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
  const Trip trip{false, true, Shared::none, {}};
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
  const Trip trip{};
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
