// The protocol sources of every way under the schedule explorer as a GPU runs them: a rank is several squads, which speak and hear
// for themselves and share rows in parts. With memory of their own they number few rows by themselves; without, all together,
// chunk by chunk.
//
// HEDDLE_REPLAY=way/problem/mode/schedule runs one schedule that a failure has printed (docs/explorer.md).
#include <cstdlib>

#include "explorer/squad_worker.hpp"
#include "explorer/ways.hpp"

namespace heddle::explorer {
namespace {

static_assert(Worker<SquadWorker<true>>);

/// Every way by so many squads a rank, with memory of their own and without.
std::vector<Way> ways_of(int squads) {
  std::vector<Way> all;
  const auto add = [&](std::vector<Way> some, const char* crew) {
    for (Way& one : some) {
      one.name = fmt::format("{}{}_{}", squads, crew, one.name);
      one.make = [squads, make = one.make](Problem problem) {
        problem.workers = squads;
        return make(problem);
      };
      all.push_back(one);
    }
  };
  add(ways<SquadWorker<true>>(), "squads");
  add(ways<SquadWorker<false>>(), "together");
  return all;
}

// Words have one writer each and are waited for, so one schedule stands for all of them, whatever the number of squads.
TEST(ExplorerSquads, AllSchedulesOfTwoRanks) {
  for (const int squads : {1, 2, 3}) {
    for (const Way& way : ways_of(squads)) {
      if (way.polls) continue;
      for (const std::size_t i : {0u, 1u, 2u}) {
        const auto scenario = way.make(problems()[i]);
        fmt::print("{}, {}\n", way.name, scenario->name());
        for (const char* name : {"strict", "late"})
          expect_complete(explore_all(*scenario, 100000, mode(name)), fmt::format("{}/{}/{}", way.name, i, name));
      }
    }
  }
}

TEST(ExplorerSquads, RandomSchedules) {
  constexpr std::uint64_t seed = 20240603;
  for (const int squads : {2, 3, 4}) {
    for (const Way& way : ways_of(squads)) {
      const std::vector<Problem> all = problems();
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!fits(way, all[i]) || all[i].ranks * squads > max_workers) continue;
        const auto scenario = way.make(all[i]);
        fmt::print("{}, {}\n", way.name, scenario->name());
        for (const char* name : {"strict", "late"})
          expect_clean(explore_random(*scenario, seed + i, 20, mode(name)), fmt::format("{}/{}/{}", way.name, i, name));
      }
    }
  }
}

TEST(ExplorerSquads, Replay) {
  const char* wanted = std::getenv("HEDDLE_REPLAY");
  if (wanted == nullptr) GTEST_SKIP() << "HEDDLE_REPLAY=way/problem/mode/schedule is not set";
  for (const int squads : {1, 2, 3, 4}) {
    if (replay_wanted(ways_of(squads), wanted)) return;
  }
  GTEST_SKIP() << "HEDDLE_REPLAY=" << wanted << " is of no way of this program";
}

}  // namespace
}  // namespace heddle::explorer
