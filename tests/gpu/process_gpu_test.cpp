// A device workspace over processes: two of them, on two GPUs where two are, else taking turns on one. With and without
// seeing each other's GPU; every way, bit for bit; a process that dies or stops in the middle is named, and the other goes on.
#include "gpu/process_run.hpp"

#include <optional>

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

#define SKIP_WITHOUT_GPUS() \
  if (gpus_for_processes() == 0) GTEST_SKIP() << "no GPU here"

constexpr int processes = 2;
bool time_sliced() { return gpus_for_processes() < processes; }

bool on_gpus(const ExchangeOptions& options) {
  return !(options.way == Way::gather && options.gather == GatherMode::tensor_parallel) && !options.cpu_sync;
}

/// Every way on `ranks` ranks; where processes take turns on a GPU one mode of each way is enough.
std::vector<Case> cases(int ranks) {
  std::vector<Case> all;
  for (const ExchangeOptions& options : every_way(128, 11, ranks, 3, 9)) {
    const bool plain = options.gather == GatherMode::padded && options.reduce == Reduce::rank;
    if (!on_gpus(options) || (time_sliced() && !plain)) continue;
    Case c;
    c.options = options;
    for (int r = 0; r < ranks; ++r) c.tokens.push_back(r % 3 == 1 ? 0 : 9 - r % 4);
    all.push_back(c);
  }
  return all;
}

/// The GPU of a process and its ranks. `blind`: it sees no other one.
DeviceGroupOptions options_of(int process, int ranks, bool blind, seconds deadline = seconds(60)) {
  const int gpu = time_sliced() ? 0 : process;
  if (blind) see_only_gpu(gpu);
  return {ranks, {blind ? 0 : gpu}, deadline};
}

std::string group_name(const char* test) { return std::string("test.gpu.") + test + "." + std::to_string(getppid()); }
std::unique_ptr<Group> join(const char* test, int process) {
  return join_process_group(group_name(test), process, processes, {milliseconds(60000)});
}

void expect_nothing_left(std::size_t files) {
  EXPECT_EQ(files_left(), files);
  EXPECT_EQ(sockets_left("test.gpu."), 0);
  EXPECT_EQ(sockets_left("pass."), 0);
}

/// Process p has p + `least` ranks.
void run_every_way(const char* test, int least, bool blind) {
  const std::size_t files = files_left();
  const auto statuses = run_processes(processes, [&](int process) {
    const auto group = join(test, process);
    const DeviceGroupOptions mine = options_of(process, least + process, blind);
    for (const Case& c : cases(2 * least + 1)) {
      SCOPED_TRACE(testing::Message() << title(c.options) << ", process " << process);
      ProcessRun run(c, *group, mine);
      ASSERT_EQ(run.workspace().ranks(), c.ranks());
      ASSERT_EQ(run.first(), process * least);
      ASSERT_EQ(run.workspace().process_of(c.ranks() - 1), 1);
      for (int round = 0; round < 3; ++round) {
        run.round_trip(round, round == 0);
        if (testing::Test::HasFatalFailure()) return;
      }
      group->barrier("end of a case");
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << "exit statuses; 1: an expectation failed, 3: an exception, both said above";
  expect_nothing_left(files);
}

TEST(ProcessGpu, EveryWay) {
  SKIP_WITHOUT_GPUS();
  run_every_way("ways", 1, false);
}

TEST(ProcessGpu, EveryWayWhereEachSeesOnlyItsOwnGpu) {
  SKIP_WITHOUT_GPUS();
  run_every_way("blind", time_sliced() ? 1 : 3, true);
}

TEST(ProcessGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPUS();
  if (time_sliced()) GTEST_SKIP() << "two GPUs are needed: taking turns on one is delay enough";
  const auto seed = static_cast<std::uint32_t>(test_seed());
  const auto statuses = run_processes(processes, [seed](int process) {
    const auto group = join("delays", process);
    const DeviceGroupOptions mine = options_of(process, 2, true);
    for (const Case& c : cases(4)) {
      SCOPED_TRACE(testing::Message() << title(c.options) << ", process " << process);
      ProcessRun run(c, *group, mine);
      for (int round = 0; round < 20; ++round) {
        run.workspace().set_delays(std::chrono::microseconds(process == round % 2 ? 50 : 2),
                                   seed + static_cast<std::uint32_t>(round));
        run.round_trip(round, false);
        if (testing::Test::HasFatalFailure()) return;
      }
      group->barrier("end of a case");
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// A dispatch captured in each process, in the strictest mode, and replayed with other tokens and numbers of them.
TEST(ProcessGpu, GraphsReplayWithOtherTokens) {
  SKIP_WITHOUT_GPUS();
  const auto statuses = run_processes(processes, [](int process) {
    const auto group = join("graphs", process);
    const DeviceGroupOptions mine = options_of(process, 2, true);
    for (Case c : cases(4)) {
      if (c.options.way == Way::normal) continue;
      SCOPED_TRACE(testing::Message() << title(c.options) << ", process " << process);
      c.tokens.assign(4, 9);
      ProcessRun run(c, *group, mine);
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      check(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeGlobal), "begin of the capture");
      run.dispatch();
      check(cudaStreamEndCapture(run.stream(), &graph), "end of the capture");
      check(cudaGraphInstantiate(&replay, graph, 0), "instantiation");
      check(cudaGraphDestroy(graph), "graph");
      for (int round = 0; round < 6; ++round) {
        run.bring({9, round * 7 % 10, round * 5 % 10, round * 3 % 10});  // the step's largest batch was fixed at capture
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
      group->barrier("end of a case");
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// What one process sees wrong, both are told.
TEST(ProcessGpu, DisagreementIsNamedOnEveryProcess) {
  SKIP_WITHOUT_GPUS();
  const auto statuses = run_processes(processes, [](int process) {
    const auto group = join("disagree", process);
    const DeviceGroupOptions mine = options_of(process, 1, true);
    const auto expect_error = [&](const DeviceGroupOptions& options, std::size_t bytes, const std::string& text, const char* part) {
      try {
        DeviceWorkspace workspace(*group, options, bytes, text);
        ADD_FAILURE() << "no error that names " << part;
      } catch (const InputError& error) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nshould name " << part;
      }
    };
    expect_error(mine, 4096, process == 0 ? "cap=64\n" : "cap=128\n", "process 1 was created with cap=128, process 0 with cap=64");
    expect_error(mine, process == 0 ? 4096 : 8192, "cap=64\n", "heap_bytes=8192");
    DeviceGroupOptions wrong = mine;
    if (process == 1) wrong.devices = {77};
    expect_error(wrong, 4096, "cap=64\n", "GPU 77");
    if (process == 1) wrong = {1, {0, 0}, seconds(60)};
    expect_error(wrong, 4096, "cap=64\n", "named twice");
    expect_error(mine, std::size_t{1} << 41, "cap=64\n", "has no memory for a heap of");
    expect_error(mine, std::size_t{1} << 55, "cap=64\n", "no addresses for a heap of");
    EXPECT_NO_THROW(DeviceWorkspace(*group, mine, 4096, "cap=64\n")) << "and after all that the processes still work together";
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// A rank of process 1 refuses its input: process 0, whose ranks only hear of it, gets that rank's fault too.
TEST(ProcessGpu, AFaultOfOneProcessIsNamedInTheOther) {
  SKIP_WITHOUT_GPUS();
  const auto statuses = run_processes(processes, [](int process) {
    const auto group = join("fault", process);
    const DeviceGroupOptions mine = options_of(process, 2, true);
    for (Case c : cases(4)) {
      SCOPED_TRACE(testing::Message() << title(c.options) << ", process " << process);
      c.tokens = {4, 4, 4, 4};
      c.none = 0;
      ProcessRun run(c, *group, mine);
      run.round_trip(0, false);
      if (testing::Test::HasFatalFailure()) return;
      run.load_round(1);
      RankData bad = draw(c, 3, 1);
      bad.ids[5] = 11;
      if (run.owns(3)) run.load(3, bad);
      try {
        run.dispatch();
        run.wait();
        ADD_FAILURE() << "id 11 of 11 experts was accepted";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().rank, 3) << error.what();
        EXPECT_EQ(error.fault().phase, "input check");
        EXPECT_EQ(error.fault().expected, 11u);
        EXPECT_EQ(error.fault().seen, 11u);
      }
      EXPECT_THROW(run.workspace().throw_if_aborted(), FaultError) << "until a reset the fault stands";
      run.workspace().reset();
      EXPECT_NO_THROW(run.workspace().throw_if_aborted());
      std::string mine_after;
      for (const Word epoch : run.epochs()) mine_after += std::to_string(epoch) + " ";
      for (const std::string& other : group->exchange(mine_after, "epochs")) EXPECT_EQ(other, mine_after) << "epochs after a reset";
      for (int round = 2; round < 4; ++round) {
        run.round_trip(round, false);
        if (testing::Test::HasFatalFailure()) return;
      }
      group->barrier("end of a case");
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// --- Death in the middle ----------------------------------------------------------------------------------------------

enum class Moment { before_dispatch, in_dispatch, before_combine };
const char* name(Moment moment) {
  return moment == Moment::before_dispatch ? "before dispatch" : moment == Moment::in_dispatch ? "in dispatch" : "before combine";
}

constexpr milliseconds kernel_deadline(1500);

/// Process 1: two good calls, then a third in which it sends itself `signal`.
void leave_in_the_middle(ProcessRun& run, Moment moment, int signal) {
  run.load_round(2);
  if (moment == Moment::before_dispatch) raise(signal);
  run.dispatch();
  if (moment == Moment::in_dispatch) raise(signal);  // its kernels may be running
  run.wait();
  run.run_own_experts(nullptr);
  raise(signal);
}

/// Process 0: the third call ends in an error that names a rank of process 1.
void expect_named_fault(ProcessRun& run) {
  auto since = Clock::now();
  try {
    run.load_round(2);
    since = Clock::now();
    run.dispatch();
    run.wait();
    run.run_own_experts(nullptr);
    since = Clock::now();
    run.combine();
    run.wait();
    ADD_FAILURE() << "process 1 was not missed";
  } catch (const FaultError& error) {
    EXPECT_LT(Clock::now() - since, 2 * kernel_deadline) << error.what();
    EXPECT_TRUE(run.owns(error.fault().rank)) << error.what();
    ASSERT_GE(error.fault().peer, 0) << error.what();
    EXPECT_EQ(run.workspace().process_of(error.fault().peer), 1) << error.what();
    EXPECT_NE(error.fault().expected, error.fault().seen) << error.what();
  }
}

void go_on_alone(const Case& c, ProcessRun& run, Group& group, const DeviceGroupOptions& mine) {
  std::vector<bool> live;
  for (int rank = 0; rank < c.ranks(); ++rank) live.push_back(run.owns(rank));
  run.workspace().reset(live);
  for (int round = 3; round < 6; ++round) {
    run.round_trip(round, false, live);
    if (testing::Test::HasFatalFailure()) return;
  }
  // A context of the survivors only, made after the death.
  Case alone = c;
  alone.options.placement = Placement::contiguous(c.options.placement.experts(), run.count());
  alone.tokens.resize(static_cast<std::size_t>(run.count()));
  ProcessRun fresh(alone, group, mine);
  for (int round = 0; round < 2; ++round) {
    fresh.round_trip(round, round == 0);
    if (testing::Test::HasFatalFailure()) return;
  }
}

void live(int process, const Case& c, Moment moment, int signal) {
  SCOPED_TRACE(testing::Message() << title(c.options) << ", " << name(moment) << ", process " << process);
  const auto group = join("death", process);
  const DeviceGroupOptions mine = options_of(process, 2, true);
  ProcessRun run(c, *group, mine);
  for (int round = 0; round < 2; ++round) run.round_trip(round, false);
  run.workspace().set_deadline(kernel_deadline);
  group->barrier("all have made two calls");
  if (process == 1) return leave_in_the_middle(run, moment, signal);
  expect_named_fault(run);
  if (!testing::Test::HasFailure()) go_on_alone(c, run, *group, mine);
}

void run_deaths(int signal) {
  const std::size_t files = files_left();
  const std::size_t memory = free_device_memory();
  int which = 0;
  for (const Case& c : cases(4)) {
    const auto moment = static_cast<Moment>(which++ % 3);
    SCOPED_TRACE(testing::Message() << title(c.options) << ", " << name(moment));
    std::fflush(nullptr);
    std::vector<pid_t> children;
    for (int process = 0; process < processes; ++process) {
      const pid_t child = fork();
      if (child == 0) {
        int status = 3;
        try {
          live(process, c, moment, signal);
          status = testing::Test::HasFailure() ? 1 : 0;
        } catch (const std::exception& error) {
          std::fprintf(stderr, "process %d: %s\n", process, error.what());
        }
        std::fflush(nullptr);
        _exit(status);
      }
      children.push_back(child);
    }
    int survivor = 0, victim = 0;
    waitpid(children[0], &survivor, 0);
    kill(children[1], SIGKILL);  // a stopped one would stay for ever
    waitpid(children[1], &victim, 0);
    EXPECT_TRUE(WIFEXITED(survivor) && WEXITSTATUS(survivor) == 0) << "process 0 ended with " << survivor << "; why is said above";
    EXPECT_TRUE(WIFSIGNALED(victim) && WTERMSIG(victim) == SIGKILL) << "process 1 should have been ended, not " << victim;
  }
  expect_nothing_left(files);
  // The driver gives memory back soon after the last process has gone.
  std::size_t left = free_device_memory();
  for (int look = 0; look < 20 && left + (64u << 20) < memory; ++look) {
    usleep(500000);
    left = free_device_memory();
  }
  EXPECT_GE(left + (64u << 20), memory) << "bytes of device memory were not given back";
}

TEST(ProcessGpu, AKilledProcessIsNamedAndTheOtherGoesOn) {
  SKIP_WITHOUT_GPUS();
  run_deaths(SIGKILL);
}

TEST(ProcessGpu, AStoppedProcessIsNamedAndTheOtherGoesOn) {
  SKIP_WITHOUT_GPUS();
  run_deaths(SIGSTOP);
}

// A process that does not come to the creation is named.
TEST(ProcessGpu, AProcessThatDoesNotComeIsNamed) {
  SKIP_WITHOUT_GPUS();
  const auto statuses = run_processes(processes, [](int process) {
    const auto group = join("absent", process);
    group->set_deadline(milliseconds(2000));
    if (process == 1) return;
    try {
      DeviceWorkspace workspace(*group, options_of(process, 1, true), 4096, "");
      ADD_FAILURE() << "process 1 was not missed";
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().peer, 1) << error.what();
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace heddle
