// gather whose rows travel with the flag beside the data: the host engine's bits for all numbers of ranks, sizes and shares of
// rows; steps on both sides of the limit and other ways in turn; in bursts with sleeps; masked ranks and faults.
#include <gtest/gtest.h>

#include "gpu/modes.hpp"
#include "gpu/trips.hpp"

namespace heddle {
namespace {

constexpr std::chrono::seconds deadline(20);

Case tagged_case(int hidden, int ranks, int topk, int cap, int tagged, const std::vector<int>& tokens) {
  Case c;
  c.options = options_for(Way::gather, hidden, 24, ranks, topk, cap);
  c.options.tagged_tokens = tagged;
  for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(tokens[static_cast<std::size_t>(rank) % tokens.size()]);
  return c;
}

/// Whole and in halves, every kind of shared expert, outputs of all ranks in the end; arrivals against the host engine.
void play_rounds(const Case& c, const DeviceExchangeOptions& device = {}) {
  SCOPED_TRACE(testing::Message() << device.sms << " CTAs a GPU (0: all)\n" << describe(c.options));
  Modes modes(c, deadline, device);
  for (int round = 0; round < 4; ++round) {
    const Shared shared = round == 0 ? Shared::none : round == 1 ? Shared::gated : Shared::rows;
    modes.round_trip(round, {round % 2 == 1, round == 2, shared, {}});
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Hidden 64 is less than a piece of a row, 1216 ends within one, 7168 is many; 20 choices are more words than a warp has lanes.
TEST(TaggedGpu, HostEnginesBitsOfEveryShape) {
  SKIP_WITHOUT_GPU();
  for (const int hidden : {64, 1216, 4096, 7168}) {
    for (const int ranks : {1, 2, 3, 8, 24}) {
      if (ranks < gpus_here()) continue;
      for (const int topk : {1, 6, 20}) {
        if (topk != 6 && hidden > 1216) continue;
        play_rounds(tagged_case(hidden, ranks, topk, 16, 16, {1, 1, 0}));
        if (HasFatalFailure()) return;
        play_rounds(tagged_case(hidden, ranks, topk, 16, 16, {16, 0, 9}));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More rows than warps, and launches that are no cluster.
TEST(TaggedGpu, ManyTokensAndFewCtas) {
  SKIP_WITHOUT_GPU();
  const int ranks = std::max(2, gpus_here());
  for (const int ctas : {0, ranks, 3 * ranks}) {
    DeviceExchangeOptions device;
    device.sms = ctas;
    for (const int cap : {16, 64, 300}) {
      play_rounds(tagged_case(2880, ranks, 5, cap, cap, {cap, cap / 2}), device);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(TaggedGpu, ResultsMadeInPlace) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {2, 5}) {
    if (ranks < gpus_here()) continue;
    const Case c = tagged_case(1024, ranks, 3, 12, 12, {12, 0, 11, 3});
    DeviceRun run({c}, gpus_here(), deadline, {});
    for (int round = 0; round < 4; ++round) {
      ASSERT_TRUE(round_trip_in_place(c, run, round));
      if (HasFatalFailure()) return;
    }
  }
}

/// Captured round trips of all cases in random order, in one piece and in halves, with other tokens, routing and sleeps.
void stress(const std::vector<Case>& cases, int rounds, std::uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "HEDDLE_SEED=" << seed);
  DeviceRun run(cases, gpus_here(), deadline, {});
  struct Play {
    std::unique_ptr<Pool> pool;
    std::vector<std::unique_ptr<Trip>> trips;
  };
  std::vector<Play> plays;
  for (std::size_t way = 0; way < cases.size(); ++way) {
    for (const int step : {1, 5, cases[way].options.cap}) {
      plays.emplace_back();
      plays.back().pool = std::make_unique<Pool>(run, cases[way], step, 6, Shared::rows, seed);
      for (const bool halves : {false, true})
        plays.back().trips.push_back(std::make_unique<Trip>(run, TripPlan{way, step, halves, true}, Shared::rows));
    }
  }
  Rounds play(run, 8, seed);
  std::mt19937_64 random(seed);
  for (int done = 0; done < rounds && !testing::Test::HasFailure(); done += 8) {
    const auto longest = std::chrono::microseconds(random() % 3 == 0 ? 40 : random() % 2 == 0 ? 5 : 0);
    run.workspace().set_delays(longest, static_cast<std::uint32_t>(random()));
    for (int i = 0; i < 8; ++i) {
      const Play& now = plays[random() % plays.size()];
      play.play(*now.trips[random() % now.trips.size()], *now.pool);
    }
    play.settle();
  }
}

// Steps of 1 and 5 tokens travel tagged, those of the cap do not; words of calls long ago lie where the next ones are waited for.
TEST(TaggedGpu, BurstsOfStepsOnBothSidesOfTheLimit) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (const int ranks : {std::max(2, gpus_here()), 4 * std::max(2, gpus_here())}) {
    stress({tagged_case(1024, ranks, 3, 24, 8, {24})}, longer(800), seed);
    if (HasFailure()) return;
  }
}

// Other ways, and gather of other sizes, in the same workspace: places of the one's words are other ranks' of another's.
TEST(TaggedGpu, BesideOtherWaysInOneWorkspace) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  const int ranks = std::max(2, gpus_here());
  std::vector<Case> cases{tagged_case(4096, ranks, 6, 9, 9, {9}), tagged_case(192, ranks, 2, 16, 16, {16}),
                          tagged_case(1024, ranks, 4, 12, 0, {12})};
  for (const Way way : {Way::one_sided, Way::low_latency, Way::elastic}) {
    cases.push_back(tagged_case(512, ranks, 3, 10, 0, {10}));
    cases.back().options = options_for(way, 512, 24, ranks, 3, 10);
  }
  stress(cases, longer(400), seed);
}

TEST(TaggedGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() > 4) GTEST_SKIP() << "for four ranks";
  const std::vector<bool> survivors{true, false, true, true};
  Modes modes(tagged_case(512, 4, 3, 9, 9, {6, 4, 0, 9}), deadline);
  modes.round_trip(0, {false, true, Shared::none, {}});
  modes.run().workspace().reset(survivors);
  for (int round = 1; round < 3 && !HasFatalFailure(); ++round)
    modes.round_trip(round, {round == 2, true, Shared::rows, survivors});
  modes.run().workspace().reset(std::vector<bool>(survivors.size(), true));
  if (!HasFatalFailure()) modes.round_trip(3, {false, true, Shared::none, {}});
}

// Choices are looked at when the rows are on their way already: the fault is the same.
TEST(TaggedGpu, BadIdsAreAFaultAndAResetHeals) {
  SKIP_WITHOUT_GPU();
  const int ranks = 2 * std::max(2, gpus_here());
  const Case c = tagged_case(256, ranks, 3, 9, 9, {4});
  DeviceRun run(c, gpus_here(), std::chrono::milliseconds(1500));
  round_trip(c, run, 0, false, false, false);
  for (int round = 1; round < 4; ++round) {
    RankData bad = draw(c, 1, round);
    bad.ids[4] = 0;
    bad.ids[5] = round == 1 ? 24 : round == 2 ? -2 : 0;  // the last: a choice twice
    for (int rank = 0; rank < ranks; ++rank) run.load(rank, rank == 1 ? bad : draw(c, rank, round));
    run.settle();
    try {
      run.dispatch_fused({round == 3 ? 9 : 4, Phase::decode});
      run.wait();
      ADD_FAILURE() << "bad ids were accepted in round " << round;
    } catch (const FaultError& error) {
      EXPECT_EQ(error.fault().rank, 1) << error.what();
      EXPECT_EQ(error.fault().expected, 24u) << error.what();
    }
    run.workspace().reset();
    round_trip(c, run, round + 4, true, round == 2, false);
    if (HasFatalFailure()) return;
  }
}

TEST(TaggedGpu, MoreTokensThanTheStepAreAFault) {
  SKIP_WITHOUT_GPU();
  const int ranks = std::max(2, gpus_here());
  const Case c = tagged_case(256, ranks, 3, 9, 9, {6});
  DeviceRun run(c, gpus_here(), std::chrono::milliseconds(1500));
  for (int rank = 0; rank < ranks; ++rank) run.load(rank, draw(c, rank, 0));
  run.settle();
  try {
    run.dispatch_fused({5, Phase::decode});
    run.wait();
    ADD_FAILURE() << "6 tokens were accepted in a step of 5";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().expected, 5u) << error.what();
    EXPECT_EQ(error.fault().seen, 6u) << error.what();
  }
  run.workspace().reset();
  round_trip(c, run, 1, true, false, true);
}

TEST(TaggedGpu, ASilentGpuIsNamedAndAResetHeals) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed";
  const std::chrono::milliseconds short_deadline(300);
  for (const bool in_dispatch : {true, false}) {
    SCOPED_TRACE(in_dispatch ? "silent in dispatch" : "silent in combine");
    const Case c = tagged_case(512, 2, 3, 9, 9, {6, 9});
    DeviceRun run(c, 2, short_deadline);
    round_trip(c, run, 0, false, false, false);
    for (int rank = 0; rank < 2; ++rank) run.load(rank, draw(c, rank, 1));
    run.settle();
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
      EXPECT_EQ(error.fault().rank, 0) << error.what();
      EXPECT_EQ(error.fault().peer, 1) << error.what();
      EXPECT_NE(std::string(error.what()).find(in_dispatch ? "arrival flag" : "flag of the partial sums"), std::string::npos)
          << error.what();
    }
    run.workspace().reset();
    for (int round = 2; round < 4; ++round) {
      round_trip(c, run, round, true, false, false);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace heddle
