// elastic over several nodes under the schedule explorer: what happens in a node's heap, and messages in every order.
//
// HEDDLE_REPLAY=way/problem/mode/schedule runs one schedule that a failure has printed (docs/explorer.md).
#include <cstdlib>

#include "explorer/mutants.hpp"
#include "explorer/trips/batches.hpp"
#include "explorer/trips/nodes.hpp"
#include "explorer/ways.hpp"

namespace heddle::explorer {
namespace {

std::vector<Way> over_nodes() {
  return {way<NodesTrip<NodeMode::direct, Reduce::rank>, ExplorerWorker>("nodes_direct"),
          way<NodesTrip<NodeMode::direct, Reduce::home>, ExplorerWorker>("nodes_direct_home"),
          way<NodesTrip<NodeMode::hybrid, Reduce::rank>, ExplorerWorker>("nodes_hybrid"),
          way<NodesTrip<NodeMode::hybrid, Reduce::home>, ExplorerWorker>("nodes_hybrid_home"),
          way<BatchesTrip<NodeMode::direct>, ExplorerWorker>("batches_direct"),
          way<BatchesTrip<NodeMode::hybrid>, ExplorerWorker>("batches_hybrid")};
}

/// Two nodes of two ranks, by default a worker each.
Problem two_by_two(std::vector<std::vector<int>> tokens) {
  Problem problem;
  problem.ranks = 4;
  problem.experts = 4;
  problem.topk = 2;
  problem.tokens = std::move(tokens);
  problem.routing = 3;
  return problem;
}

TEST(ExplorerNodes, AllSchedulesOfTwoNodesWithTwoRows) {
  for (const Way& way : over_nodes()) {
    for (const int i : {0, 1}) {
      const auto scenario = way.make(problems()[static_cast<std::size_t>(i)]);
      fmt::print("{}\n", scenario->name());
      for (const char* name : {"strict", "late"})
        expect_complete(explore_all(*scenario, 100000, mode(name)), fmt::format("{}/{}/{}", way.name, i, name));
    }
  }
}

TEST(ExplorerNodes, RandomSchedules) {
  constexpr std::uint64_t seed = 20261201;
  for (const Way& way : over_nodes()) {
    const std::vector<Problem> all = problems();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].live.empty() || all[i].ranks == 1) continue;  // no masked ranks over nodes
      const auto scenario = way.make(all[i]);
      fmt::print("{}\n", scenario->name());
      for (const char* name : {"strict", "late"}) {
        expect_clean(explore_random(*scenario, seed + i, 1000, mode(name)), fmt::format("{}/{}/{}", way.name, i, name));
      }
    }
    const auto scenario = way.make(two_by_two({{2, 1, 0, 2}, {1, 2, 2, 0}, {0, 0, 1, 2}}));
    for (const char* name : {"strict", "late"})
      expect_clean(explore_random(*scenario, seed, 2000, mode(name)), way.name + "/two nodes of two/" + name);
  }
}

template <class Trip, class Mutant>
void expect_found(const char* bug) {
  RoundTrips<Trip, Mutant> scenario(two_by_two({{2, 1, 2, 2}, {1, 2, 2, 1}}));
  for (const char* name : {"strict", "late"}) {
    const Report report = explore_random(scenario, 20261202, 5000, mode(name));
    fmt::print("{}, {}: {}\n", bug, name, report.line());
    EXPECT_TRUE(report.violation) << bug << ", " << name;
  }
}

template <class Trip>
void expect_all_found() {
  expect_found<Trip, CountBeforeRows>("a count published before its rows");
  expect_found<Trip, CopiesNotCompleted>("a count published while its rows are under way");
  expect_found<Trip, MissingAcquire>("a missing acquire");
}

TEST(ExplorerNodes, FindsPlantedMistakes) { expect_all_found<NodesTrip<NodeMode::hybrid, Reduce::rank>>(); }
TEST(ExplorerNodes, FindsPlantedMistakesOfBatches) { expect_all_found<BatchesTrip<NodeMode::hybrid>>(); }

TEST(ExplorerNodes, Replay) {
  const char* wanted = std::getenv("HEDDLE_REPLAY");
  if (wanted == nullptr) GTEST_SKIP() << "HEDDLE_REPLAY=way/problem/mode/schedule is not set";
  if (!replay_wanted(over_nodes(), wanted)) GTEST_SKIP() << "HEDDLE_REPLAY=" << wanted << " is of no way of this program";
}

}  // namespace
}  // namespace heddle::explorer
