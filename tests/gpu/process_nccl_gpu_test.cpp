// gather by NCCL with a process a GPU: arrivals and outputs bit for bit those of the host engine and of gather's own kernels,
// graphs, and who does not come. What every process is told without a GPU is tested without one. NCCL's kernels have no deadline: a
// process that hangs is ended by an alarm.
#include <gmock/gmock.h>

#include <thread>

#include "exchange/cuda_nccl.hpp"
#include "gpu/process_run.hpp"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr int processes = 2;

std::unique_ptr<Group> join(const char* test, int process, milliseconds deadline = milliseconds(60000)) {
  const std::string name = std::string("test.nccl.") + test + "." + std::to_string(getppid());
  return join_process_group(name, process, processes, {deadline});
}

/// Multicast stays off, as in the benchmark; a process that hangs for two minutes ends by a signal.
void prepare_child() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  alarm(120);
}

/// Empty, or why processes cannot make communicators here: asked of one process, which has a GPU for itself.
std::string no_nccl() {
  static const bool here = ask_a_child([] {
                             try {
                               return NcclCommunicators({0}).ranks() == 1 ? std::size_t{1} : std::size_t{0};
                             } catch (const Error& error) {
                               std::fprintf(stderr, "%s\n", error.what());
                               return std::size_t{0};
                             }
                           }) == 1;
  return here ? "" : "no communicator here; why is said above";
}

#define SKIP_WITHOUT_NCCL(gpus)                                                    \
  if (gpus_for_processes() < (gpus)) GTEST_SKIP() << (gpus) << " GPUs are needed"; \
  if (!no_nccl().empty()) GTEST_SKIP() << no_nccl()

/// The GPU of a process, with one rank. `blind`: it sees no other one.
DeviceGroupOptions options_of(int process, bool blind) {
  if (blind) see_only_gpu(process);
  return {1, {blind ? 0 : process}, std::chrono::seconds(60)};
}

Case gather_case(Wire wire) {
  Case c;
  c.options = options_for(Way::gather, 320, 19, processes, 4, 33);
  c.options.wire = wire;
  c.tokens = {33, 5};
  return c;
}

DeviceExchangeOptions by(const std::shared_ptr<NcclCommunicators>& nccl) {
  DeviceExchangeOptions options;
  options.nccl = nccl;
  return options;
}

void expect_refused(Group& group, const std::vector<int>& devices, const std::string& part) {
  try {
    const NcclCommunicators made(group, devices);
    ADD_FAILURE() << "accepted; should name: " << part;
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

// --- Without a GPU ------------------------------------------------------------------------------------------------------

TEST(ProcessNccl, WhatOneProcessAsksWronglyBothAreTold) {
  const auto statuses = run_processes(processes, [](int process) {
    prepare_child();
    const auto group = join("wrong", process);
    expect_refused(*group, process == 0 ? std::vector<int>{3, 0, 3} : std::vector<int>{0}, "ranks share GPU 3");
    expect_refused(*group, process == 0 ? std::vector<int>{} : std::vector<int>{0}, "at least one GPU");
    group->barrier("the processes are still together");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(ProcessNccl, AProcessThatDoesNotComeIsNamed) {
  constexpr milliseconds deadline(1000);
  const auto statuses = run_processes(processes, [&](int process) {
    prepare_child();
    const auto group = join("absent", process);
    group->set_deadline(deadline);
    if (process == 1) return;
    const auto since = Clock::now();
    try {
      const NcclCommunicators made(*group, {0});
      ADD_FAILURE() << "process 1 was not missed";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().peer, 1) << error.what();
      EXPECT_LT(Clock::now() - since, 2 * deadline) << error.what();
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// --- With one GPU --------------------------------------------------------------------------------------------------------

TEST(ProcessNccl, ProcessesThatShareAGpuAreRefused) {
  SKIP_WITHOUT_NCCL(1);
  const auto statuses = run_processes(processes, [](int process) {
    prepare_child();
    const auto group = join("shared", process);
    expect_refused(*group, {0}, "processes 0 and 1 share GPU-");
    expect_refused(*group, {process == 0 ? 0 : 77}, "GPU 77 was asked for");
    group->barrier("the processes are still together");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// --- With two --------------------------------------------------------------------------------------------------------------

void run_every_wire(const char* test, bool blind) {
  const auto statuses = run_processes(processes, [&](int process) {
    prepare_child();
    const auto group = join(test, process);
    const DeviceGroupOptions mine = options_of(process, blind);
    const auto nccl = std::make_shared<NcclCommunicators>(*group, mine.devices);
    ASSERT_EQ(nccl->ranks(), processes);
    for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
      SCOPED_TRACE(testing::Message() << "wire " << static_cast<int>(wire) << ", process " << process);
      ProcessRun run(gather_case(wire), *group, mine, by(nccl));
      for (int round = 0; round < 4; ++round) {
        run.round_trip(round, true);  // two ranks are one hop: the bits of a sum that is rounded once
        if (testing::Test::HasFatalFailure()) return;
      }
      EXPECT_NO_THROW(nccl->throw_if_failed());
      group->barrier("end of a case");
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << "-14: hung; 1: an expectation failed, 3: an exception, both said above";
}

TEST(ProcessNccl, RoundTripsOfEveryWire) {
  SKIP_WITHOUT_NCCL(2);
  run_every_wire("wires", false);
}

TEST(ProcessNccl, RoundTripsWhereEachSeesOnlyItsOwnGpu) {
  SKIP_WITHOUT_NCCL(2);
  run_every_wire("blind", true);
}

TEST(ProcessNccl, ArrivesAsByOwnKernels) {
  SKIP_WITHOUT_NCCL(2);
  const auto statuses = run_processes(processes, [](int process) {
    prepare_child();
    const auto group = join("own", process);
    const DeviceGroupOptions mine = options_of(process, true);
    const Case c = gather_case(Wire::fp8);
    const auto nccl = std::make_shared<NcclCommunicators>(*group, mine.devices);
    ProcessRun by_nccl(c, *group, mine, by(nccl));
    ProcessRun own(c, *group, mine);
    for (ProcessRun* run : {&by_nccl, &own}) {
      run->load_round(3);
      run->dispatch();
      run->wait();
    }
    const HostArrived theirs = by_nccl.arrived(process);
    const HostArrived ours = own.arrived(process);
    ASSERT_EQ(theirs.view.room, ours.view.room);
    ASSERT_EQ(theirs.view.row_stride, ours.view.row_stride);
    expect_same_arrival(c, theirs, ours);
    for (ProcessRun* run : {&by_nccl, &own}) {
      run->run_own_experts(nullptr);
      run->combine();
      run->wait();
      run->expect_own_outputs(3, {});
    }
    group->barrier("end");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(ProcessNccl, GraphsReplayWithOtherTokens) {
  SKIP_WITHOUT_NCCL(2);
  const auto statuses = run_processes(processes, [](int process) {
    prepare_child();
    const auto group = join("graphs", process);
    const DeviceGroupOptions mine = options_of(process, true);
    Case c = gather_case(Wire::bf16);
    c.tokens = {33, 33};
    const auto nccl = std::make_shared<NcclCommunicators>(*group, mine.devices);
    ProcessRun run(c, *group, mine, by(nccl));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeRelaxed), "begin of the capture");
    run.dispatch();
    check(cudaStreamEndCapture(run.stream(), &graph), "end of the capture");
    check(cudaGraphInstantiate(&replay, graph, 0), "instantiation");
    check(cudaGraphDestroy(graph), "graph");
    for (int round = 0; round < 6; ++round) {
      run.bring({33, round * 7 % 34});  // the step's largest batch was fixed at capture
      run.load_round(round);
      check(cudaGraphLaunch(replay, run.stream()), "replay");
      run.wait();
      run.run_own_experts(nullptr);
      run.combine();
      run.wait();
      run.expect_own_outputs(round, {});
      if (testing::Test::HasFatalFailure()) return;
    }
    check(cudaGraphExecDestroy(replay), "graph");
    group->barrier("end");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// Process 1 settles everything with process 0 and then does not come to NCCL's own meeting: where NCCL alone would wait for ever.
TEST(ProcessNccl, AProcessThatLeavesInTheMiddleIsNamed) {
  SKIP_WITHOUT_NCCL(2);
  constexpr milliseconds deadline(4000);
  const auto statuses = run_processes(processes, [&](int process) {
    prepare_child();
    const auto group = join("leaves", process);
    const DeviceGroupOptions mine = options_of(process, true);
    check(cudaSetDevice(mine.devices[0]), "cudaSetDevice");
    check(cudaFree(nullptr), "the context");  // its making takes seconds, and is no part of what is timed
    group->barrier("contexts are made");
    group->set_deadline(deadline);
    if (process == 1) {
      meet_for_nccl(*group, mine.devices);
      std::this_thread::sleep_for(2 * deadline);
      return;
    }
    const auto since = Clock::now();
    try {
      const NcclCommunicators made(*group, mine.devices);
      ADD_FAILURE() << "process 1 was not missed";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().peer, 1) << error.what();
      EXPECT_LT(Clock::now() - since, 2 * deadline) << error.what();
    }
    check(cudaDeviceSynchronize(), "the context afterwards");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// Process 1 does not dispatch: process 0 makes its kernel leave.
TEST(ProcessNccl, TheHostEndsAWaitForARankThatDoesNotCome) {
  SKIP_WITHOUT_NCCL(2);
  const auto statuses = run_processes(processes, [](int process) {
    prepare_child();
    const auto group = join("abort", process);
    const DeviceGroupOptions mine = options_of(process, true);
    const auto nccl = std::make_shared<NcclCommunicators>(*group, mine.devices);
    ProcessRun run(gather_case(Wire::bf16), *group, mine, by(nccl));
    run.round_trip(0, false);
    run.load_round(1);
    group->barrier("before the call");
    if (process == 0) {
      run.dispatch();
      std::this_thread::sleep_for(milliseconds(200));
      EXPECT_EQ(cudaStreamQuery(run.stream()), cudaErrorNotReady) << "GPU 0 did not wait for the other";
      nccl->abort();
      EXPECT_EQ(cudaStreamSynchronize(run.stream()), cudaSuccess) << "the context is not healthy after the abort";
      EXPECT_THROW(run.dispatch(), Error) << "aborted communicators were used";
    }
    group->barrier("process 0 has given up");
    nccl->abort();
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace heddle
