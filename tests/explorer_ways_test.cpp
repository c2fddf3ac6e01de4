// The protocol sources of every way under the schedule explorer. A new way is one line in ways().
//
// HEDDLE_REPLAY=way/problem/mode/schedule runs one schedule that a failure has printed (docs/explorer.md).
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "explorer/search.hpp"
#include "explorer/trips/elastic.hpp"
#include "explorer/trips/gather.hpp"
#include "explorer/trips/low_latency.hpp"
#include "explorer/trips/normal.hpp"
#include "explorer/trips/one_sided.hpp"

namespace heddle::explorer {
namespace {

struct Way {
  std::string name;
  std::function<std::unique_ptr<Scenario>(const Problem&)> make;
  bool polls = false;            ///< waits by looking again and again: too many schedules to make them all
  bool few_words = false;        ///< two rendezvous a call: all orders of its words can be made
  bool skips_dead_ranks = true;  ///< false: run only with all ranks live
};

template <class Trip>
Way way(const std::string& name) {
  return {name, [](const Problem& problem) { return std::make_unique<RoundTrips<Trip>>(problem); }};
}

std::vector<Way> ways() {
  std::vector<Way> all = {
      way<LowLatencyTrip>("low_latency"),
      way<OneSidedTrip>("one_sided"),
      way<ElasticTrip<Reduce::rank, false>>("elastic_rank"),
      way<ElasticTrip<Reduce::rank, true>>("elastic_rank_expanded"),
      way<ElasticTrip<Reduce::home, false>>("elastic_home"),
      way<ElasticTrip<Reduce::home, true>>("elastic_home_expanded"),
      way<GatherTrip<Gathering::padded>>("gather_padded"),
      way<GatherTrip<Gathering::uneven>>("gather_uneven"),
      way<GatherTrip<Gathering::zero_filled>>("gather_zero_filled"),
      way<TensorParallelTrip>("gather_tensor_parallel"),
      way<NormalTrip>("normal"),
      way<WithAllGather<LowLatencyTrip>>("low_latency_all_gather"),
      way<WithAllGather<OneSidedTrip>>("one_sided_all_gather"),
  };
  for (Way& one : all) {
    one.polls = one.name == "normal";
    one.few_words =
        one.name == "low_latency" || one.name == "one_sided" || one.name == "elastic_rank" || one.name == "gather_padded";
    // Its slices are the mover's business (gather/host.cpp), and the trip here deals them over all ranks.
    one.skips_dead_ranks = one.name != "gather_tensor_parallel";
  }
  return all;
}

/// Races are violations; or they are not, writes are seen late, and local verbs are points of choice too.
Options mode(const std::string& name) {
  Options options;
  options.late_copies = true;
  options.races = name == "strict";
  options.every_verb = name == "late";
  return options;
}

/// ranks, workers, experts, top-k, tokens a call and rank.
std::vector<Problem> problems() {
  const auto problem = [](int ranks, int workers, int experts, int topk, std::vector<std::vector<int>> tokens) {
    Problem made;
    made.ranks = ranks;
    made.workers = workers;
    made.experts = experts;
    made.topk = topk;
    made.tokens = std::move(tokens);
    return made;
  };
  std::vector<Problem> all = {
      problem(2, 1, 2, 1, {{2, 2}, {2, 2}}),
      problem(2, 1, 4, 2, {{2, 2}, {1, 2}, {2, 1}}),
      problem(2, 2, 4, 2, {{2, 2}, {2, 0}}),
      problem(2, 1, 1, 1, {{2, 0}, {0, 1}, {0, 2}}),           // one expert, ranks without tokens, blocks that change
      problem(3, 1, 2, 2, {{1, 2, 1}, {0, 0, 2}, {0, 0, 0}}),  // a rank without experts, a call without tokens
      problem(3, 2, 6, 3, {{2, 1, 0}, {1, 3, 1}, {2, 2, 2}}),
      problem(1, 2, 3, 2, {{3}, {2}}),
      problem(3, 1, 3, 2, {{2, 0, 2}, {1, 0, 2}}),  // rank 1 is dead
      problem(4, 2, 8, 2, {{1, 2, 0, 2}, {2, 2, 1, 0}}),
  };
  all[1].wire = Wire::fp8;
  all[5].wire = Wire::fp8;
  all[5].queue_rows = 1;
  all[7].live = {true, false, true};
  for (std::size_t i = 0; i < all.size(); ++i) all[i].routing = static_cast<int>(i);
  return all;
}

bool fits(const Way& way, const Problem& problem) { return problem.live.empty() || way.skips_dead_ranks; }

void expect_clean(const Report& report, const std::string& replay_name) {
  fmt::print("  {}\n", report.line());
  if (!report.violation) return;
  ADD_FAILURE() << report.violation->what << "\nHEDDLE_REPLAY=" << replay_name << "/" << report.violation->schedule << "\n"
                << report.violation->trace;
}

void expect_complete(const Report& report, const std::string& replay_name) {
  expect_clean(report, replay_name);
  EXPECT_TRUE(report.complete || report.violation) << report.line();
}

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
  std::vector<std::string> parts(1);
  for (const char* c = wanted; *c != 0; ++c) *c == '/' ? parts.emplace_back() : parts.back() += *c;
  ASSERT_EQ(parts.size(), 4u) << "HEDDLE_REPLAY=way/problem/mode/schedule";
  for (const Way& way : ways()) {
    if (way.name != parts[0]) continue;
    const auto scenario = way.make(problems().at(std::stoul(parts[1])));
    expect_clean(replay(*scenario, parts[3], mode(parts[2])), parts[0] + "/" + parts[1] + "/" + parts[2]);
    return;
  }
  FAIL() << "no way " << parts[0];
}

}  // namespace
}  // namespace heddle::explorer
