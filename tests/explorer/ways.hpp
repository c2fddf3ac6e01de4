// The ways as scenarios of the schedule explorer, and the problems that they are run on. A new way is one line in ways().
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "explorer/search.hpp"
#include "explorer/trips/elastic.hpp"
#include "explorer/trips/gather.hpp"
#include "explorer/trips/low_latency.hpp"
#include "explorer/trips/normal.hpp"
#include "explorer/trips/one_sided.hpp"

namespace heddle::explorer {

struct Way {
  std::string name;
  std::function<std::unique_ptr<Scenario>(const Problem&)> make;
  bool polls = false;            ///< waits by looking again and again: too many schedules to make them all
  bool few_words = false;        ///< two rendezvous a call: all orders of its words can be made
  bool skips_dead_ranks = true;  ///< false: run only with all ranks live
};

template <class Trip, class W>
Way way(const std::string& name) {
  return {name, [](const Problem& problem) { return std::make_unique<RoundTrips<Trip, W>>(problem); }};
}

/// Every way and mode, run by workers W.
template <class W = ExplorerWorker>
std::vector<Way> ways() {
  std::vector<Way> all = {
      way<LowLatencyTrip, W>("low_latency"),
      way<OneSidedTrip, W>("one_sided"),
      way<ElasticTrip<Reduce::rank, false>, W>("elastic_rank"),
      way<ElasticTrip<Reduce::rank, true>, W>("elastic_rank_expanded"),
      way<ElasticTrip<Reduce::home, false>, W>("elastic_home"),
      way<ElasticTrip<Reduce::home, true>, W>("elastic_home_expanded"),
      way<GatherTrip<Gathering::padded>, W>("gather_padded"),
      way<TaggedGatherTrip, W>("gather_tagged"),
      way<GatherTrip<Gathering::uneven>, W>("gather_uneven"),
      way<GatherTrip<Gathering::zero_filled>, W>("gather_zero_filled"),
      way<TensorParallelTrip, W>("gather_tensor_parallel"),
      way<NormalTrip, W>("normal"),
      way<WithAllGather<LowLatencyTrip>, W>("low_latency_all_gather"),
      way<WithAllGather<OneSidedTrip>, W>("one_sided_all_gather"),
  };
  for (Way& one : all) {
    if (one.name == "gather_tagged") {  // for bf16 alone
      one.make = [make = one.make](Problem problem) {
        problem.wire = Wire::bf16;
        return make(problem);
      };
    }
    one.polls = one.name == "normal";
    one.few_words =
        one.name == "low_latency" || one.name == "one_sided" || one.name == "elastic_rank" || one.name == "gather_padded";
    // Its slices are the mover's business (gather/host.cpp), and the trip here deals them over all ranks.
    one.skips_dead_ranks = one.name != "gather_tensor_parallel";
  }
  return all;
}

/// Races are violations; or they are not, writes are seen late, and local verbs are points of choice too.
inline Options mode(const std::string& name) {
  Options options;
  options.late_copies = true;
  options.races = name == "strict";
  options.every_verb = name == "late";
  return options;
}

/// ranks, workers, experts, top-k, tokens a call and rank.
inline std::vector<Problem> problems() {
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

inline bool fits(const Way& way, const Problem& problem) { return problem.live.empty() || way.skips_dead_ranks; }

inline void expect_clean(const Report& report, const std::string& replay_name) {
  fmt::print("  {}\n", report.line());
  if (!report.violation) return;
  ADD_FAILURE() << report.violation->what << "\nHEDDLE_REPLAY=" << replay_name << "/" << report.violation->schedule << "\n"
                << report.violation->trace;
}

inline void expect_complete(const Report& report, const std::string& replay_name) {
  expect_clean(report, replay_name);
  EXPECT_TRUE(report.complete || report.violation) << report.line();
}

/// Runs the schedule that HEDDLE_REPLAY=way/problem/mode/schedule names, if it is of one of these ways.
inline bool replay_wanted(const std::vector<Way>& all, const std::string& wanted) {
  std::vector<std::string> parts(1);
  for (const char c : wanted) c == '/' ? parts.emplace_back() : parts.back() += c;
  if (parts.size() != 4) {
    ADD_FAILURE() << "HEDDLE_REPLAY=way/problem/mode/schedule";
    return true;
  }
  for (const Way& one : all) {
    if (one.name != parts[0]) continue;
    const auto scenario = one.make(problems().at(std::stoul(parts[1])));
    expect_clean(replay(*scenario, parts[3], mode(parts[2])), parts[0] + "/" + parts[1] + "/" + parts[2]);
    return true;
  }
  return false;
}

}  // namespace heddle::explorer
