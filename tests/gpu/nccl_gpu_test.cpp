// gather by NCCL: refusals by name (no GPU needed), arrivals bit for bit those of the host engine and of gather's own kernels, sums
// within a rounding a hop, graphs, bad ids, a rank that does not come. NCCL has no deadline of its own: where it hangs, a watchdog
// says so and ends the program.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>

#include "exchange/gather/by_nccl.hpp"
#include "gpu/communicators.hpp"
#include "gpu/device_run.hpp"

namespace heddle {
namespace {

using testing::HasSubstr;

Case gather_case(int ranks, Wire wire) {
  Case c;
  c.options = options_for(Way::gather, 320, 19, ranks, 4, 33);
  c.options.wire = wire;
  for (int r = 0; r < ranks; ++r) c.tokens.push_back(r % 3 == 1 ? 5 : 33 - 7 * (r % 4));
  return c;
}

/// A whole round trip's outputs against one rounding of the f32 sum: equal for up to two ranks, which are one hop, else within 2^-8
/// a rank of its norm. `shared` is added by a rounding of its own.
void expect_sums(const Case& c, DeviceRun& run, int round, bool shared) {
  for (int rank = 0; rank < c.ranks(); ++rank) {
    const std::vector<bf16> want = expected(c, draw(c, rank, round), {}, shared ? Shared::rows : Shared::none);
    const std::vector<bf16> have = read(run.seat(rank).out.data(), want.size());
    if (c.ranks() <= 2 && !shared) {
      ASSERT_EQ(differences(want, have.data()), 0) << "rank " << rank << " of " << c.ranks() << ", round " << round;
      continue;
    }
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(static_cast<double>(to_float(have[i])) - static_cast<double>(to_float(want[i])), 2);
      norm += std::pow(static_cast<double>(to_float(want[i])), 2);
    }
    ASSERT_LE(std::sqrt(difference), std::sqrt(norm) * c.ranks() / 256.0) << "rank " << rank << ", round " << round;
  }
}

void nccl_round_trip(const Case& c, DeviceRun& run, int round, bool fused, bool shared) {
  for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(c, rank, round));
  run.settle();
  if (fused) {
    run.dispatch_fused({c.most_tokens(), Phase::decode});
  } else {
    run.dispatch({c.most_tokens(), Phase::decode}, false);
  }
  run.wait();
  const std::vector<HostArrived> host = host_arrivals(c, round);
  const auto results = results_of(c, run, &host);
  if (testing::Test::HasFatalFailure()) return;
  std::vector<const bf16*> pointers;
  for (const auto& buffer : results) pointers.push_back(buffer.data());
  run.settle();
  run.combine(pointers, shared, fused);
  run.wait();
  expect_sums(c, run, round, shared);
}

/// A part for each GPU, of one process and then another one's, if that has some.
cuda::DeviceMap map_of(const std::vector<int>& gpus, int ranks, const std::vector<int>& gpus_of_another = {}) {
  cuda::DeviceMap map;
  map.gpus = gpus.size();
  for (const int gpu : gpus) map.parts.push_back({0, gpu, "GPU-a", 0, 1});
  for (const int gpu : gpus_of_another) map.parts.push_back({1, gpu, "GPU-b", 0, 1});
  const int parts = static_cast<int>(map.parts.size());
  for (int part = 0, first = 0; part < parts; ++part) {
    cuda::Part& it = map.parts[static_cast<std::size_t>(part)];
    it.first_rank = first;
    it.ranks = ranks / parts + (part < ranks % parts ? 1 : 0);
    first += it.ranks;
  }
  return map;
}

TEST(NcclGather, RefusesByNameWhatItCannotServe) {
  const ExchangeOptions good = options_for(Way::gather, 128, 8, 2, 2, 4);
  const cuda::DeviceMap two = map_of({0, 1}, 2);
  EXPECT_EQ(refused_by_nccl(good, two, two), "");
  ExchangeOptions other = options_for(Way::one_sided, 128, 8, 2, 2, 4);
  EXPECT_THAT(refused_by_nccl(other, two, two), HasSubstr("way one_sided has kernels of its own"));
  other = good;
  other.gather = GatherMode::uneven;
  EXPECT_THAT(refused_by_nccl(other, two, two), HasSubstr("GatherMode::padded"));
  other = good;
  other.combine_wire = Wire::fp8;
  EXPECT_THAT(refused_by_nccl(other, two, two), HasSubstr("Wire::bf16"));
  EXPECT_THAT(refused_by_nccl(good, map_of({0}, 2), map_of({0}, 1)), HasSubstr("2 ranks share 1 GPUs"));
  EXPECT_THAT(refused_by_nccl(good, two, map_of({1, 0}, 2)), HasSubstr("for GPU 1, GPU 0; the group's ranks are on GPU 0, GPU 1"));
  EXPECT_THAT(refused_by_nccl(good, two, map_of({0}, 1)), HasSubstr("for GPU 0; the group's ranks are on GPU 0, GPU 1"));
  EXPECT_THAT(refused_by_nccl(options_for(Way::gather, 128, 8, 3, 2, 4), two, two), HasSubstr("the placement is for 3 ranks"));
  const cuda::DeviceMap processes = map_of({0}, 2, {0});
  EXPECT_EQ(refused_by_nccl(good, processes, processes), "") << "each process calls its GPU 0";
  EXPECT_THAT(refused_by_nccl(good, processes, two), HasSubstr("on GPU 0 of process 0 (GPU-a), GPU 0 of process 1 (GPU-b)"));
}

TEST(NcclGather, NamesTheRankThatIsMasked) {
  EXPECT_EQ(refused_while_masked({true, true}), "");
  EXPECT_THAT(refused_while_masked({true, false, true}), HasSubstr("rank 1 is masked"));
}

TEST(NcclGather, CommunicatorsNeedAGpuEach) {
  try {
    const NcclCommunicators shared({0, 1, 0});
    FAIL() << "three ranks on two GPUs were accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("ranks share GPU 0"));
  }
  EXPECT_THROW(NcclCommunicators({}), InputError);
}

TEST(NcclGather, RoundTripsOfEveryWire) {
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
    const Case c = gather_case(gpus_here(), wire);
    SCOPED_TRACE(testing::Message() << "wire " << static_cast<int>(wire) << ", NCCL " << nccl->version());
    DeviceExchangeOptions options;
    options.nccl = nccl;
    DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), options);
    for (int round = 0; round < 4; ++round) {
      nccl_round_trip(c, run, round, round % 2 == 1, round >= 2);
      if (HasFatalFailure()) return;
    }
  }
}

// Rows, ids and weights at the same places as gather's own kernels put them.
TEST(NcclGather, ArrivesAsByOwnKernels) {
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  const Case c = gather_case(gpus_here(), Wire::fp8);
  DeviceExchangeOptions options;
  options.nccl = nccl;
  DeviceRun by_nccl({c}, gpus_here(), std::chrono::seconds(20), options);
  DeviceRun own(c, gpus_here());
  for (DeviceRun* run : {&by_nccl, &own}) {
    for (int rank = 0; rank < c.ranks(); ++rank) run->load(rank, draw(c, rank, 3));
    run->settle();
    run->dispatch_fused({c.most_tokens(), Phase::decode});
    run->wait();
  }
  for (int rank = 0; rank < c.ranks(); ++rank) {
    SCOPED_TRACE(testing::Message() << "rank " << rank);
    const HostArrived theirs = by_nccl.arrived(rank);
    const HostArrived ours = own.arrived(rank);
    ASSERT_EQ(theirs.view.room, ours.view.room);
    ASSERT_EQ(theirs.view.row_stride, ours.view.row_stride);
    expect_same_arrival(c, theirs, ours);
    if (HasFatalFailure()) return;
  }
}

TEST(NcclGather, GraphsReplayWithOtherTokens) {
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  Case c = gather_case(gpus_here(), Wire::bf16);
  c.tokens.assign(c.tokens.size(), 33);
  DeviceExchangeOptions options;
  options.nccl = nccl;
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), options);
  nccl_round_trip(c, run, 0, true, false);
  if (HasFatalFailure()) return;
  const std::size_t gpus = run.workspace().gpus();
  for (std::size_t gpu = 0; gpu < gpus; ++gpu) {
    const cuda::DeviceScope scope(run.workspace().device(gpu));
    check(cudaStreamBeginCapture(run.stream(gpu), cudaStreamCaptureModeRelaxed), "capture");
  }
  run.dispatch_fused({33, Phase::decode});
  std::vector<cudaGraphExec_t> graphs(gpus);
  for (std::size_t gpu = 0; gpu < gpus; ++gpu) {
    const cuda::DeviceScope scope(run.workspace().device(gpu));
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(run.stream(gpu), &graph), "end of capture");
    check(cudaGraphInstantiate(&graphs[gpu], graph, 0), "instantiation");
    check(cudaGraphDestroy(graph), "graph");
  }
  for (int round = 1; round < 8; ++round) {
    Case now = c;
    for (std::size_t r = 0; r < now.tokens.size(); ++r) now.tokens[r] = (round * 7 + static_cast<int>(r) * 5) % 34;
    now.tokens[0] = 33;  // the step's largest batch was fixed at capture
    for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(now, rank, round));
    run.settle();
    for (std::size_t gpu = 0; gpu < gpus; ++gpu) check(cudaGraphLaunch(graphs[gpu], run.stream(gpu)), "replay");
    run.wait();
    const std::vector<HostArrived> host = host_arrivals(now, round);
    const auto results = results_of(now, run, &host);
    if (HasFatalFailure()) return;
    std::vector<const bf16*> pointers;
    for (const auto& buffer : results) pointers.push_back(buffer.data());
    run.settle();
    run.combine(pointers, false, true);
    run.wait();
    expect_sums(now, run, round, false);
    if (HasFatalFailure()) return;
  }
  for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph), "graph");
}

TEST(NcclGather, BadIdsAreAFaultAndAResetHeals) {
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  Case c = gather_case(gpus_here(), Wire::fp8);
  c.none = 0;
  DeviceExchangeOptions options;
  options.nccl = nccl;
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), options);
  nccl_round_trip(c, run, 0, true, false);
  if (HasFatalFailure()) return;
  const int last = c.ranks() - 1;
  RankData bad = draw(c, last, 1);
  bad.ids[5] = bad.ids[4];  // of token 1, whose choices are 4 to 7
  for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, rank == last ? bad : draw(c, rank, 1));
  run.settle();
  try {
    run.dispatch_fused({c.most_tokens(), Phase::decode});
    run.wait();
    ADD_FAILURE() << "a repeated id was accepted";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().rank, last);
    EXPECT_EQ(error.fault().expected, 19u);
    EXPECT_EQ(error.fault().seen, static_cast<std::uint64_t>(bad.ids[5]));
  }
  EXPECT_THROW(run.dispatch_fused({c.most_tokens(), Phase::decode}), FaultError) << "the fault stands until a reset";
  run.workspace().reset();
  nccl_round_trip(c, run, 2, true, false);
}

TEST(NcclGather, MaskedRanksAreRefused) {
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  const Case c = gather_case(gpus_here(), Wire::bf16);
  DeviceExchangeOptions options;
  options.nccl = nccl;
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), options);
  std::vector<bool> live(static_cast<std::size_t>(c.ranks()), true);
  live[1] = false;
  run.workspace().reset(live);
  try {
    run.dispatch_fused({c.most_tokens(), Phase::decode});
    FAIL() << "a masked rank was accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1 is masked"));
  }
}

// Last, since the communicators do not survive it: one GPU calls alone, and the host makes its kernel leave.
TEST(NcclGather, TheHostEndsAWaitForARankThatDoesNotCome) {
  COMMUNICATORS_OR_SKIP(nccl, gpus_here());
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  const Case c = gather_case(gpus_here(), Wire::bf16);
  DeviceExchangeOptions options;
  options.nccl = nccl;
  DeviceRun run({c}, gpus_here(), std::chrono::seconds(20), options);
  for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, draw(c, rank, 0));
  run.settle();
  run.dispatch_on(0, {c.most_tokens(), Phase::decode});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(cudaStreamQuery(run.stream(0)), cudaErrorNotReady) << "GPU 0 did not wait for the others";
  nccl->abort();
  EXPECT_EQ(cudaStreamSynchronize(run.stream(0)), cudaSuccess) << "the context is not healthy after the abort";
  EXPECT_THROW(run.dispatch_on(0, {c.most_tokens(), Phase::decode}), Error) << "aborted communicators were used";
}

}  // namespace
}  // namespace heddle
