// The explorer catches order bugs: protocols that run on workers with a planted bug.
#include <gtest/gtest.h>

#include "explorer/mutants.hpp"
#include "explorer/search.hpp"
#include "explorer/trips/low_latency.hpp"
#include "explorer/trips/one_sided.hpp"

namespace heddle::explorer {
namespace {

constexpr std::uint64_t most_schedules = 20000;

/// The search found a violation of the kind, and its schedule shows it again.
void expect_caught(Scenario& scenario, const Options& options, const Report& report, const std::string& kind) {
  fmt::print("  {}\n", report.line());
  ASSERT_TRUE(report.violation) << scenario.name() << ": " << report.line();
  EXPECT_NE(report.violation->what.find(kind), std::string::npos) << report.violation->what;
  const Report again = replay(scenario, report.violation->schedule, options);
  ASSERT_TRUE(again.violation);
  EXPECT_EQ(again.violation->what, report.violation->what);
  EXPECT_EQ(again.violation->trace, report.violation->trace);
}

/// With races as violations, and again with writes that are merely seen late, by two searches.
template <class Trip, class Mutant>
void expect_bug(const char* bug, const Problem& problem, const std::string& kind, const std::string& late_kind) {
  RoundTrips<Trip, Mutant> scenario(problem);
  fmt::print("{} in {}\n", bug, scenario.name());
  const Options strict;
  const Options late{.races = false};
  const Report shown = explore_all(scenario, most_schedules, strict);
  expect_caught(scenario, strict, shown, kind);
  if (shown.violation) fmt::print("  schedule {}\n{}", shown.violation->schedule, shown.violation->trace);
  expect_caught(scenario, late, explore_all(scenario, most_schedules, late), late_kind);
  expect_caught(scenario, late, explore_random(scenario, 20240601, most_schedules, late), late_kind);
}

template <class Trip>
void expect_bugs(const Problem& problem) {
  expect_bug<Trip, CountBeforeRows>("a count published before its rows", problem, "race", "wrong data");
  expect_bug<Trip, CopiesNotCompleted>("a count published while rows are under way", problem, "race", "wrong data");
  expect_bug<Trip, EarlyReset>("a word reset too early", problem, "deadlock", "deadlock");
  expect_bug<Trip, MissingAcquire>("a missing acquire", problem, "race", "wrong data");
  expect_bug<Trip, StaleEpoch>("a barrier passed by a stale epoch", problem, "race", "wrong data");
  Problem team = problem;
  team.workers = 2;
  expect_bug<Trip, NoTeamBarrier>("workers that do not meet", team, "", "");
}

TEST(ExplorerMutants, OneSided) {
  expect_bugs<OneSidedTrip>({});
  Problem problem;
  problem.experts = 1;
  problem.tokens = {{2, 0}, {0, 1}};
  expect_bug<OneSidedTrip, ReusedSlot>("a reused slot", problem, "race", "");
}

TEST(ExplorerMutants, LowLatency) { expect_bugs<LowLatencyTrip>({}); }

}  // namespace
}  // namespace heddle::explorer
