// The protocol sources of every way under the schedule explorer, ranks being squads of one lane as on the host.
//
// HEDDLE_REPLAY=way/problem/mode/schedule runs one schedule that a failure has printed (docs/explorer.md).
#include <cstdlib>

#include "explorer/ways.hpp"

namespace heddle::explorer {
namespace {

TEST(ExplorerWays, AllSchedulesOfTwoRanksWithTwoRows) {
  for (const Way& way : ways()) {
    if (way.polls) continue;
    for (const int i : {0, 1, 2}) {
      const auto scenario = way.make(problems()[static_cast<std::size_t>(i)]);
      fmt::print("{}\n", scenario->name());
      for (const char* name : {"strict", "late"}) {
        expect_complete(explore_all(*scenario, 100000, mode(name)), fmt::format("{}/{}/{}", way.name, i, name));
      }
    }
  }
}

TEST(ExplorerWays, TwoPreemptionsAtAnyVerbOfTwoRanks) {
  for (const Way& way : ways()) {
    Problem one_call = problems()[0];
    one_call.tokens.resize(1);
    const auto scenario = way.make(one_call);
    fmt::print("{}\n", scenario->name());
    Options late = mode("late");
    late.every_verb = false;
    expect_complete(explore_bounded(*scenario, 2, 1000000, late), way.name + "/one call");
  }
}

TEST(ExplorerWays, AllOrdersOfWordsInOneCall) {
  for (const Way& way : ways()) {
    if (!way.few_words) continue;
    Problem one_call = problems()[0];
    one_call.tokens.resize(1);
    const auto scenario = way.make(one_call);
    fmt::print("{}\n", scenario->name());
    expect_complete(explore_word_orders(*scenario, 1000000, mode("strict")), way.name + "/one call");
  }
}

TEST(ExplorerWays, AllSchedulesOfAQueue) {
  // One row each way with words seen late, and two rows through a queue of one with words seen at once.
  Problem problem;
  problem.queue_rows = 1;
  problem.tokens = {{1, 1}};
  RoundTrips<NormalTrip> one_row(problem);
  fmt::print("{}\n", one_row.name());
  expect_complete(explore_all(one_row, 100000), "normal/one row");
  problem.experts = 1;
  problem.tokens = {{0, 2}};
  RoundTrips<NormalTrip> two_rows(problem);
  fmt::print("{}\n", two_rows.name());
  Options prompt;
  prompt.late_words = false;
  expect_complete(explore_all(two_rows, 100000, prompt), "normal/two rows");
}

TEST(ExplorerWays, RandomSchedules) {
  constexpr std::uint64_t seed = 20240602;
  for (const Way& way : ways()) {
    const std::vector<Problem> all = problems();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!fits(way, all[i])) continue;
      const auto scenario = way.make(all[i]);
      fmt::print("{}\n", scenario->name());
      for (const char* name : {"strict", "late"}) {
        expect_clean(explore_random(*scenario, seed + i, 300, mode(name)), fmt::format("{}/{}/{}", way.name, i, name));
      }
    }
  }
}

TEST(ExplorerWays, Replay) {
  const char* wanted = std::getenv("HEDDLE_REPLAY");
  if (wanted == nullptr) GTEST_SKIP() << "HEDDLE_REPLAY=way/problem/mode/schedule is not set";
  if (!replay_wanted(ways(), wanted)) GTEST_SKIP() << "HEDDLE_REPLAY=" << wanted << " is of no way of this program";
}

}  // namespace
}  // namespace heddle::explorer
