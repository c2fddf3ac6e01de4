// Processes that SIGKILL ends in the middle of a call, rank 0 among them: the others get a named error in
// time, go on without the dead with right answers, and nothing is left behind.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "processes.hpp"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int ranks = 4;
constexpr std::chrono::milliseconds deadline(sanitized ? 3000 : 1500);

/// Who dies in which order, and where in a call.
struct Deaths {
  std::vector<int> victims;
  std::vector<std::uint64_t> draws;
};

Deaths plan_deaths(std::uint64_t seed, int which) {
  std::mt19937_64 random = generator(seed, which, 5);
  const int other = 1 + static_cast<int>(random() % 3);
  Deaths deaths;
  deaths.victims = random() % 2 == 0 ? std::vector<int>{0, other} : std::vector<int>{other, 0};
  for (int i = 0; i < 2; ++i) deaths.draws.push_back(random());
  return deaths;
}

/// One rank's life in a process of its own.
class Life {
 public:
  Life(Group& group, const Case& c)
      : group_(group),
        case_(c),
        live_(ranks, true),
        memory_(exchange_memory(c.options)),
        workspace_(group, memory_.heap_bytes(ranks), describe(c.options)) {
    set_verb_hook([this] {
      if (verb_++ == last_verb_) kill(getpid(), SIGKILL);
    });
    exchange_ = create_exchange(workspace_, c.options, memory_);
    round_trip(*exchange_, case_, group_.rank(), round_++);
    verbs_ = verb_;
  }

  void die(std::uint64_t draw) {
    last_verb_ = verb_ + 1 + static_cast<int>(draw % static_cast<std::uint64_t>(verbs_ - 1));
    for (int call = 0; call < 3; ++call) trip(call);
    ADD_FAILURE() << "rank " << group_.rank() << " should be dead";
  }

  void outlive(int victim) {
    expect_fault(victim);
    live_[static_cast<std::size_t>(victim)] = false;
    workspace_.reset(live_);
    round_ += 3;
    for (int call = 0; call < 4; ++call) trip(call);
    round_ += 4;
  }

  /// A second context of the survivors, made after the deaths.
  void start_anew() {
    Workspace workspace(group_, memory_.heap_bytes(ranks), describe(case_.options));
    const auto exchange = create_exchange(workspace, case_.options, memory_);
    TripOptions options;
    options.live = live_;
    for (int call = 0; call < 2; ++call) round_trip(*exchange, case_, group_.rank(), call, options);
    workspace.close();
  }

 private:
  void trip(int call) {
    TripOptions options;
    options.live = live_;
    options.all_outputs = call % 2 == 1;
    options.shared = call % 2 == 0 ? Shared::rows : Shared::none;
    round_trip(*exchange_, case_, group_.rank(), round_ + call, options);
  }

  void expect_fault(int victim) {
    for (int call = 0; call < 3; ++call) {
      const auto since = Clock::now();
      try {
        trip(call);
      } catch (const FaultError& error) {
        EXPECT_LT(Clock::now() - since, 2 * deadline);
        const Fault& fault = error.fault();
        EXPECT_TRUE(fault.rank >= 0 && fault.rank < ranks && fault.rank != victim) << error.what();
        EXPECT_TRUE(fault.peer >= 0 && fault.peer < ranks && fault.peer != fault.rank) << error.what();
        EXPECT_TRUE(fault.phase.find(name(case_.options.way)) == 0 || fault.phase == "all-gather of the outputs") << error.what();
        EXPECT_FALSE(fault.word.empty());
        EXPECT_NE(fault.expected, fault.seen) << error.what();
        return;
      }
    }
    ADD_FAILURE() << "rank " << group_.rank() << " did not notice the death of rank " << victim;
  }

  Group& group_;
  Case case_;
  std::vector<bool> live_;
  ExchangeMemory memory_;
  Workspace workspace_;
  std::unique_ptr<Exchange> exchange_;
  std::atomic<int> verb_ = 0;
  int last_verb_ = -1;
  int verbs_ = 0;
  int round_ = 0;
};

void live(const std::string& group_name, int rank, const Case& c, const Deaths& deaths) {
  const auto group = join_process_group(group_name, rank, ranks, {std::chrono::milliseconds(30000)});
  Life life(*group, c);
  group->barrier("all are here");
  group->set_deadline(deadline);
  for (std::size_t i = 0; i < deaths.victims.size(); ++i) {
    if (rank == deaths.victims[i]) {
      life.die(deaths.draws[i]);
      return;
    }
    life.outlive(deaths.victims[i]);
    if (testing::Test::HasFailure()) return;
  }
  life.start_anew();
}

TEST(Killed, SurvivorsGoOnWithoutTheDeadInEveryWay) {
  const std::uint64_t seed = test_seed();
  const std::string prefix = "test.killed." + std::to_string(getpid());
  const std::size_t files = files_left();
  // All ways at once: they mostly wait for their deadlines.
  Processes processes;
  std::vector<int> want;
  std::vector<std::string> titles;
  for (const int workers : {1, 2}) {
    for (const ExchangeOptions& options : every_way(64, 9, ranks, 3, 5)) {
      Case c;
      c.options = options;
      c.options.workers = workers;
      c.tokens = {5, 3, 0, 4};
      if (c.tensor_parallel()) c.tokens = {5, 5, 5, 5};
      c.seed = titles.size();
      const auto which = static_cast<int>(titles.size());
      const Deaths deaths = plan_deaths(seed, which);
      const std::string name = prefix + "." + std::to_string(which);
      processes.start(ranks, [&](int rank) { live(name, rank, c, deaths); });
      for (int rank = 0; rank < ranks; ++rank) {
        const bool dies = rank == deaths.victims[0] || rank == deaths.victims[1];
        want.push_back(dies ? -SIGKILL : 0);
      }
      titles.push_back(title(options));
    }
  }
  const std::vector<int> statuses = processes.wait();
  for (std::size_t i = 0; i < statuses.size(); ++i) {
    EXPECT_EQ(statuses[i], want[i]) << titles[i / ranks] << ", rank " << i % ranks;
  }
  EXPECT_EQ(files_left(), files);
  EXPECT_EQ(sockets_left(prefix), 0);
}

// Everybody dies in the middle of a call: the memory goes with the last process.
TEST(Killed, NothingIsLeftWhenAllAreKilled) {
  const std::string prefix = "test.allkilled." + std::to_string(getpid());
  const std::size_t files = files_left();
  const auto statuses = run_processes(3, [&prefix](int rank) {
    const auto group = join_process_group(prefix, rank, 3, {std::chrono::milliseconds(30000)});
    Case c;
    c.options = options_for(Way::low_latency, 64, 9, 3, 3, 5);
    c.tokens = {5, 3, 4};
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(*group, memory.heap_bytes(3), describe(c.options));
    int verbs = 20 + rank;
    set_verb_hook([&verbs] {
      if (verbs-- == 0) kill(getpid(), SIGKILL);
    });
    const auto exchange = create_exchange(workspace, c.options, memory);
    for (int round = 0; round < 2; ++round) round_trip(*exchange, c, rank, round);
  });
  EXPECT_EQ(statuses, (std::vector<int>{-SIGKILL, -SIGKILL, -SIGKILL}));
  EXPECT_EQ(files_left(), files);
  EXPECT_EQ(sockets_left(prefix), 0);
}

}  // namespace
}  // namespace heddle
