// Rows, imbalance, copies and predicted times of a replay, against other countings of the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "heddle/error.hpp"
#include "replay/replay.hpp"

namespace heddle::replay {
namespace {

const std::string data = std::string(HEDDLE_TEST_DATA) + "/routing/";

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// Sums over the rows, from the ids alone: sets of (token, rank), and the home of a token by the rule in words.
void expect_rows(const Routing& routing, const ReplicaMap& map, const StepRows& step) {
  const int ranks = map.ranks();
  std::vector<int> home;
  for (int rank = 0; rank < ranks; ++rank)
    home.insert(home.end(), index(routing.tokens / ranks + (rank < routing.tokens % ranks ? 1 : 0)), rank);
  std::vector<Rows> pairs(index(ranks)), copies(index(ranks));
  std::set<std::pair<int, int>> needed, touched;
  const auto add = [](std::vector<Rows>& rows, int from, int to) {
    ++rows[index(to)].received;
    if (from == to) return;
    ++rows[index(to)].received_remote;
    ++rows[index(from)].sent_remote;
  };
  const Routing chosen = choose_copies(map, CopyRule::levelled, routing, homes_of(routing.tokens, ranks));
  for (int token = 0; token < routing.tokens; ++token) {
    for (int choice = 0; choice < routing.topk; ++choice) {
      const int copy = chosen.ids[index(token * routing.topk + choice)];
      if (copy < 0) continue;
      EXPECT_EQ(map.logical_of(copy), routing.ids[index(token * routing.topk + choice)]);
      const int rank = map.placement().rank_of(copy);
      add(pairs, home[index(token)], rank);
      needed.insert({token, rank});
      touched.insert({rank, copy});
    }
  }
  for (const auto& [token, rank] : needed) add(copies, home[index(token)], rank);
  for (int rank = 0; rank < ranks; ++rank) {
    const RankRows& rows = step.ranks[index(rank)];
    const auto same = [](const Rows& a, const Rows& b) {
      return std::tie(a.received, a.received_remote, a.sent_remote) == std::tie(b.received, b.received_remote, b.sent_remote);
    };
    EXPECT_TRUE(same(rows.pairs, pairs[index(rank)])) << "pairs of rank " << rank;
    EXPECT_TRUE(same(rows.copies, copies[index(rank)])) << "copies of rank " << rank;
    EXPECT_EQ(rows.tokens, std::ranges::count(home, rank));
    EXPECT_EQ(rows.touched, std::ranges::count_if(touched, [&](const auto& one) { return one.first == rank; }));
  }
}

TEST(ReplayRows, AgreeWithACountingBySets) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 40; ++round) {
    const int experts = 4 + static_cast<int>(random() % 20), ranks = 1 + static_cast<int>(random() % 6);
    const Routing routing =
        draw_routing(zipf_popularity(experts, 0.7, random()),
                     {static_cast<int>(random() % 50), 1 + static_cast<int>(random() % 4), random(), 0.1, 1.0f});
    const ReplicaMap contiguous = ReplicaMap::single(Placement::contiguous(experts, ranks));
    expect_rows(routing, contiguous, count_rows(routing, contiguous, CopyRule::levelled));
    std::vector<double> loads(index(experts));
    for (double& load : loads) load = static_cast<double>(random() % 9);
    const ReplicaMap greedy = balance_experts(loads, {ranks, ranks > 1 ? static_cast<int>(random() % 4) : 0, 1, {}});
    expect_rows(routing, greedy, count_rows(routing, greedy, CopyRule::levelled));
  }
}

TEST(ReplayRows, CountsAloneGiveTheSamePairs) {
  const Routing routing = Recording::open(data + "esft_law.ids.npy").take(1, 0, 400);
  const ReplicaMap placed = ReplicaMap::single(Placement::contiguous(64, 8));
  std::vector<std::int64_t> counts(64, 0);
  for (const std::int32_t id : routing.ids) ++counts[index(id)];
  const StepRows from_ids = count_rows(routing, placed, CopyRule::levelled), from_counts = count_rows(counts, 6, placed);
  EXPECT_FALSE(from_counts.has_copies);
  EXPECT_EQ(from_counts.tokens, 400);
  for (std::size_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(from_counts.ranks[rank].pairs.received, from_ids.ranks[rank].pairs.received);
    EXPECT_EQ(from_counts.ranks[rank].touched, from_ids.ranks[rank].touched);
  }
  EXPECT_FALSE(work_of(Way::normal, from_counts, 0)) << "copies are not known";
  EXPECT_TRUE(work_of(Way::mega, from_counts, 0));
  const ReplicaMap twice = ReplicaMap::from_ranks({{0}, {0, 1}}, 2);  // five rows of two copies: three and two
  const StepRows divided = count_rows(std::vector<std::int64_t>{5, 4}, 1, twice);
  EXPECT_EQ(divided.ranks[0].pairs.received, 3);
  EXPECT_EQ(divided.ranks[1].pairs.received, 6);
}

TEST(ReplayRows, TheExampleOfTheWaysPages) {  // docs/ways/README.md: tokens a, b, c
  const Routing routing{3, 2, {0, 2, 2, 3, 0, 1}, std::vector<float>(6, 0.5f)};
  const StepRows step = count_rows(routing, ReplicaMap::single(Placement::contiguous(4, 2)), CopyRule::turns);
  const auto rows = [&](Way way) { return std::pair{work_of(way, step, 0)->rows, work_of(way, step, 1)->rows}; };
  EXPECT_EQ(rows(Way::gather), (std::pair{3.0, 3.0}));
  for (const Way way : {Way::normal, Way::elastic, Way::one_sided}) EXPECT_EQ(rows(way), (std::pair{2.0, 2.0})) << name(way);
  for (const Way way : {Way::low_latency, Way::mega}) EXPECT_EQ(rows(way), (std::pair{3.0, 3.0})) << name(way);
  EXPECT_EQ(step.ranks[0].tokens, 2) << "a and b live on rank 0";
}

PlanRequest request_of(int experts, int topk, int ranks) {
  PlanRequest request;
  request.shape = {4096, 2048, experts, topk, {}};
  request.weights = WeightKind::mxfp4;
  request.ranks = ranks;
  request.wire = Wire::fp8;
  request.machine = find_machine("h200");
  return request;
}

TEST(ReplayTimes, EvenWorkIsTheUniformRoutersTime) {
  for (const Way way : real_ways) {
    PlanRequest request = request_of(64, 6, 8);
    request.tokens = request.cap = 512;
    const Traffic out = dispatch_traffic(way, request);
    const double touched = expected_touched_experts(8, 64, 6, 4096);
    const RankWork even{out.rows, out.rows * 7 / 8, pair_counts(request.shape, 8, 512).per_rank, touched};
    EXPECT_NEAR(estimate_time(way, request, even)->total, estimate_time(way, request)->total, 1e-12) << name(way);
  }
}

TEST(ReplayTimes, TheSlowestRankCounts) {
  // Everything on rank 1: it receives all pairs, and the others send theirs.
  const Routing routing = draw_routing(hot_rank_popularity(Placement::contiguous(16, 4), 1), {400, 2, 5, 0.0, 1.0f});
  const StepRows step = count_rows(routing, ReplicaMap::single(Placement::contiguous(16, 4)), CopyRule::turns);
  const RankWork work = *work_of(Way::low_latency, step, 1);
  EXPECT_EQ(work.pairs, 800);
  EXPECT_EQ(work.link_rows, 600);
  EXPECT_EQ(work_of(Way::normal, step, 1)->rows, 400) << "one copy a token";
  EXPECT_EQ(work_of(Way::gather, step, 1)->link_rows, 300);
  const PlanRequest request = request_of(16, 2, 4);
  EXPECT_EQ(slowest(Way::low_latency, request, step)->total, estimate_time(Way::low_latency, request, work)->total);
  EXPECT_FALSE(slowest(
      Way::low_latency,
      [&] {
        PlanRequest unknown = request;
        unknown.machine = find_machine("b200");
        return unknown;
      }(),
      step))
      << "a machine without rates";
}

TEST(Replay, ContiguousLoadsAreThoseOfTheStatistics) {
  const Recording recording = Recording::open(data + "esft_law.ids.npy");
  const Source source = source_of(recording, {8, 64, 100, {}, 1});
  ASSERT_EQ(source.steps, 4);
  const ReplayResult result = replay(source, {8, 0, {0, 1, 2, 3}, {Way::normal}, request_of(64, 6, 8)});
  ASSERT_EQ(result.placements.size(), 2u);
  for (int layer = 0; layer < 4; ++layer) {
    const LayerSummary& summary = result.placements[0].layers[index(layer)];
    const RoutingLoad all = measure_load(recording.take(layer, 0, 400), Placement::contiguous(64, 8));
    EXPECT_DOUBLE_EQ(summary.expert_max_over_mean, all.expert_max_over_mean);
    EXPECT_DOUBLE_EQ(summary.rank_max_over_mean, all.rank_max_over_mean);
    EXPECT_DOUBLE_EQ(*summary.copies_a_token, all.copies_a_token);
    double mean = 0, worst = 0;
    std::int64_t most = 0;
    for (int step = 0; step < 4; ++step) {
      const RoutingLoad load = measure_load(recording.take(layer, step * 100, 100), Placement::contiguous(64, 8));
      mean += load.rank_max_over_mean / 4;
      worst = std::max(worst, load.rank_max_over_mean);
      most = std::max(most, std::ranges::max(load.copies_of_rank));
    }
    EXPECT_NEAR(summary.step_max_over_mean, mean, 1e-12);
    EXPECT_DOUBLE_EQ(summary.worst_max_over_mean, worst);
    EXPECT_EQ(summary.most_copies, most);
    EXPECT_GT(summary.seconds.at(Way::normal), 0);
  }
}

TEST(Replay, GreedyPlacementsEvenOutWhatTheyKnow) {
  const Recording recording = Recording::open(data + "esft_law.ids.npy");
  const Source one_step = source_of(recording, {8, 64, 400, {}, 1});
  const ReplayResult known = replay(one_step, {8, 8, {0, 1, 2, 3}, {}, {}});
  ASSERT_EQ(known.placements.size(), 3u);
  EXPECT_TRUE(known.unseen.empty()) << "one step has no other half";
  for (int layer = 0; layer < 4; ++layer) {
    const double contiguous = known.placements[0].layers[index(layer)].rank_max_over_mean;
    const double greedy = known.placements[1].layers[index(layer)].rank_max_over_mean;
    EXPECT_GT(contiguous, 1.15);
    EXPECT_LT(greedy, 1.05) << "layer " << layer;
    EXPECT_LT(known.placements[2].layers[index(layer)].rank_max_over_mean, 1.1);
    EXPECT_TRUE(known.placements[1].layers[index(layer)].seconds.empty()) << "no layer to predict for";
  }
  const Source steps = source_of(recording, {8, 64, 100, {}, 1});
  const ReplayResult halves = replay(steps, {8, 0, {0}, {}, {}});
  ASSERT_EQ(halves.unseen.size(), 2u);
  EXPECT_EQ(halves.unseen[0].layers[0].ranks[0].tokens, 2 * 13) << "steps 1 and 3, 13 of 100 tokens each on the first rank";
}

TEST(Replay, DecodeStepsAndExpansion) {
  const Recording recording = Recording::open(data + "gpt_oss_decode.ids.npy");
  const Source usual = source_of(recording, {4, 32, {}, {}, 1});
  EXPECT_EQ(usual.tokens, 16) << "one of each prompt";
  EXPECT_EQ(usual.steps, 24);
  const Source wide = source_of(recording, {4, 128, 40, 5, 4});  // three recorded steps each
  EXPECT_EQ(wide.steps, 5);
  const Routing second = take_step(recording, {4, 128, 40, 5, 4}, 40, 2, 1);
  EXPECT_EQ(second.ids, expand(recording.take(2, 3, 40), 4).ids);
  EXPECT_THROW(source_of(recording, {4, 32, 40, {}, 4}), InputError) << "128 experts";
  EXPECT_THROW(source_of(recording, {4, 32, 100000, {}, 1}), InputError);
  EXPECT_THROW(source_of(recording, {4, 32, {}, 0, 1}), InputError);
}

}  // namespace
}  // namespace heddle::replay
