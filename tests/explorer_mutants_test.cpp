// The explorer catches order bugs: protocol sources run on workers with a planted bug, and every search
// must find a violation whose schedule shows it again.
#include <gtest/gtest.h>

#include "explorer/mutants.hpp"
#include "explorer/search.hpp"
#include "explorer/trips/elastic.hpp"
#include "explorer/trips/gather.hpp"
#include "explorer/trips/low_latency.hpp"
#include "explorer/trips/normal.hpp"
#include "explorer/trips/one_sided.hpp"

namespace heddle::explorer {
namespace {

constexpr std::uint64_t most_schedules = 20000;
constexpr std::uint64_t seed = 20240601;

/// How a bug shows: where nothing orders two accesses, and where they merely see late writes.
struct Signs {
  std::string strict;
  std::string late;
};

void expect_caught(Scenario& scenario, const Options& options, const Report& report, const std::string& sign) {
  fmt::print("  {}\n", report.line());
  ASSERT_TRUE(report.violation) << scenario.name() << ": " << report.line();
  EXPECT_NE(report.violation->what.find(sign), std::string::npos) << report.violation->what;
  const Report again = replay(scenario, report.violation->schedule, options);
  ASSERT_TRUE(again.violation) << report.violation->schedule;
  EXPECT_EQ(again.violation->what, report.violation->what);
  EXPECT_EQ(again.violation->trace, report.violation->trace);
}

template <class Trip, class Mutant>
void expect_bug(const char* bug, const Problem& problem, const Signs& signs) {
  RoundTrips<Trip, Mutant> scenario(problem);
  fmt::print("{}, in {}\n", bug, scenario.name());
  Options strict;
  Options late;
  late.races = false;
  const Report shown = explore_all(scenario, most_schedules, strict);
  expect_caught(scenario, strict, shown, signs.strict);
  if (shown.violation) fmt::print("  schedule {}\n{}", shown.violation->schedule, shown.violation->trace);
  expect_caught(scenario, late, explore_all(scenario, most_schedules, late), signs.late);
  expect_caught(scenario, late, explore_random(scenario, seed, most_schedules, late), signs.late);
}

/// The bugs that every way shows whose waits are acquires.
template <class Trip>
void expect_bugs() {
  expect_bug<Trip, CountBeforeRows>("a count published before its rows", {}, {"race", "wrong data"});
  expect_bug<Trip, CopiesNotCompleted>("a count published while its rows are under way", {}, {"race", "wrong data"});
  expect_bug<Trip, EarlyReset>("a word reset too early", {}, {"deadlock", "deadlock"});
  expect_bug<Trip, MissingAcquire>("a missing acquire", {}, {"race", "wrong data"});
  expect_bug<Trip, StaleEpoch>("a barrier passed by a stale epoch", {}, {"", "wrong data"});
  Problem team;
  team.workers = 2;
  expect_bug<Trip, NoTeamBarrier>("workers that do not meet", team, {"", ""});
}

TEST(ExplorerMutants, OneSided) { expect_bugs<OneSidedTrip>(); }
TEST(ExplorerMutants, LowLatency) { expect_bugs<LowLatencyTrip>(); }
TEST(ExplorerMutants, Elastic) { expect_bugs<ElasticTrip<Reduce::rank, false>>(); }
TEST(ExplorerMutants, Gather) { expect_bugs<GatherTrip<Gathering::padded>>(); }

/// The bugs of ranks that are several squads.
template <class Trip>
void expect_bugs_of_squads() {
  Problem two;
  two.workers = 2;
  expect_bug<Trip, HearsOneSquad>("one squad's word taken for all", two, {"", "wrong data"});
  expect_bug<Trip, OneSquadSpeaks>("a squad that speaks for others", two, {"", "wrong data"});
}

TEST(ExplorerMutants, Squads) {
  expect_bugs_of_squads<OneSidedTrip>();
  expect_bugs_of_squads<LowLatencyTrip>();
  expect_bugs_of_squads<ElasticTrip<Reduce::rank, true>>();
  expect_bugs_of_squads<GatherTrip<Gathering::padded>>();
}

TEST(ExplorerMutants, TaggedRows) {
  expect_bug<TaggedGatherTrip, TagsNotLookedAt>("tags that nobody looks at", {}, {"wrong data", "wrong data"});
}

TEST(ExplorerMutants, SlotReusedByTheNextCall) {
  // Blocks of two rows, then of one: row 1 is first rank 0's own, then rank 1's.
  Problem problem;
  problem.experts = 1;
  problem.tokens = {{2, 0}, {0, 1}};
  expect_bug<OneSidedTrip, ReusedSlot>("a reused slot", problem, {"race", "wrong data"});
}

TEST(ExplorerMutants, SlotReusedInAQueue) {
  Problem problem;
  problem.experts = 1;
  problem.queue_rows = 1;
  problem.tokens = {{0, 2}};
  expect_bug<NormalTrip, RoomyQueue>("a reused slot of a queue", problem, {"wrong data", "wrong data"});
}

}  // namespace
}  // namespace heddle::explorer
