// Placements from loads: every expert somewhere, as many copies on every rank, loads as even as they can be made; and placements
// laid over others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "balancing/part_way.hpp"
#include "balancing_support.hpp"
#include "heddle/balancing.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

std::vector<int> experts_of(const ReplicaMap& map, int rank) {
  const auto own = map.experts_of(rank);
  return {own.begin(), own.end()};
}

/// Numbers of copies by expert.
std::vector<int> copies_of(const ReplicaMap& map) {
  std::vector<int> copies;
  for (int expert = 0; expert < map.experts(); ++expert) copies.push_back(static_cast<int>(map.copies_of(expert).size()));
  return copies;
}

bool repeats_on_a_rank(const ReplicaMap& map) {
  for (int rank = 0; rank < map.ranks(); ++rank) {
    const auto own = experts_of(map, rank);
    if (std::set<int>(own.begin(), own.end()).size() != own.size()) return true;
  }
  return false;
}

TEST(ReplicaMap, NumbersCopiesRankByRank) {
  const ReplicaMap map = ReplicaMap::from_ranks({{2, 0}, {1, 2}}, 3);
  EXPECT_EQ(map.physical(), 4);
  EXPECT_THAT(map.copies_of(2), ElementsAre(0, 3));
  EXPECT_THAT(map.copies_of(0), ElementsAre(1));
  EXPECT_THAT(experts_of(map, 1), ElementsAre(1, 2));
  EXPECT_THAT(map.placement().rank_map(), ElementsAre(0, 0, 1, 1));
  EXPECT_TRUE(map.is_even());
  EXPECT_FALSE(ReplicaMap::from_ranks({{0, 1}, {}}, 2).is_even());
  EXPECT_TRUE(map == ReplicaMap::from_ranks({{2, 0}, {1, 2}}, 3));
  EXPECT_FALSE(map == ReplicaMap::from_ranks({{0, 2}, {1, 2}}, 3));
  const ReplicaMap single = ReplicaMap::single(Placement::from_map({1, 0, 1}, 2));
  EXPECT_THAT(experts_of(single, 1), ElementsAre(0, 2));
  EXPECT_EQ(single.logical_of(0), 1);
  EXPECT_THROW(ReplicaMap::from_ranks({{0}, {2}}, 3), InputError) << "nobody holds expert 1";
  EXPECT_THROW(ReplicaMap::from_ranks({{0}, {3}}, 3), InputError);
  EXPECT_THROW(ReplicaMap::from_ranks({}, 3), InputError);
}

TEST(Balance, KnownLoadsComeOutEven) {
  const std::vector<double> loads{6, 5, 4, 3, 2, 1, 1, 2};  // 24: 12 on each of two ranks, four experts on each
  EXPECT_THAT(rank_loads(loads, balance_experts(loads, {2, 0, 1, {}})), ElementsAre(12, 12));
}

TEST(Balance, ABusyExpertIsDivided) {
  const std::vector<double> loads{9, 1, 1, 1};
  EXPECT_EQ(std::ranges::max(rank_loads(loads, balance_experts(loads, {2, 0, 1, {}}))), 10);
  const ReplicaMap divided = balance_experts(loads, {2, 2, 1, {}});  // the first copy goes to expert 0, which is then everywhere
  EXPECT_EQ(divided.copies_of(0).size(), 2u);
  EXPECT_THAT(rank_loads(loads, divided), ElementsAre(6, 6));
}

/// The example that EPLB is published with (its README): two layers of 12 experts in 4 groups, 16 copies on 8 GPUs of 2 nodes.
TEST(Balance, ThePublishedExample) {
  const BalanceOptions options{8, 4, 2, 4};
  const std::vector<double> first{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86};
  const std::vector<double> second{20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27};
  const std::vector<std::vector<int>> published[] = {{{5, 6}, {5, 7}, {8, 4}, {3, 4}, {10, 9}, {10, 2}, {0, 1}, {11, 1}},
                                                     {{7, 10}, {6, 8}, {6, 11}, {8, 9}, {2, 4}, {5, 1}, {5, 0}, {3, 1}}};
  for (const auto& [loads, ranks] : {std::pair{first, published[0]}, std::pair{second, published[1]}}) {
    const ReplicaMap theirs = ReplicaMap::from_ranks(ranks, 12), ours = balance_experts(loads, options);
    EXPECT_EQ(copies_of(ours), copies_of(theirs));
    for (int node = 0; node < 2; ++node) {
      std::set<int> a, b;
      for (int rank = 4 * node; rank < 4 * node + 4; ++rank) {
        for (const int expert : ours.experts_of(rank)) a.insert(expert);
        for (const int expert : theirs.experts_of(rank)) b.insert(expert);
      }
      EXPECT_EQ(a, b) << "experts of node " << node;
    }
    std::vector<double> ours_sorted = rank_loads(loads, ours), theirs_sorted = rank_loads(loads, theirs);
    std::ranges::sort(ours_sorted);
    std::ranges::sort(theirs_sorted);
    EXPECT_EQ(ours_sorted, theirs_sorted);
  }
}

TEST(Balance, RandomLoadsKeepTheRules) {
  std::mt19937_64 random(balancing_test::announced_seed());
  for (int round = 0; round < 300; ++round) {
    const int nodes = 1 + static_cast<int>(random() % 3), ranks = nodes * (1 + static_cast<int>(random() % 4));
    const int groups = nodes * (1 + static_cast<int>(random() % 4)), experts = groups * (1 + static_cast<int>(random() % 6));
    const int most = experts / nodes * (ranks / nodes - 1);
    const int extra = nodes * static_cast<int>(random() % static_cast<unsigned>(most + 1));
    std::vector<double> loads(static_cast<std::size_t>(experts));
    for (double& load : loads) load = random() % 3 == 0 ? 0.0 : static_cast<double>(random() % 1000);
    SCOPED_TRACE(::testing::Message() << experts << " experts in " << groups << " groups, " << extra << " more, " << ranks
                                      << " ranks, " << nodes << " nodes");
    const ReplicaMap map = balance_experts(loads, {ranks, extra, nodes, groups});
    EXPECT_EQ(map.physical(), experts + extra);
    const int share = (experts / nodes + extra / nodes + ranks / nodes - 1) / (ranks / nodes);
    EXPECT_LE(map.placement().max_local_experts(), share);
    EXPECT_EQ(map.is_even(), (experts + extra) % ranks == 0);
    const auto sums = rank_loads(loads, map);
    EXPECT_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0), std::accumulate(loads.begin(), loads.end(), 0.0), 1e-6);
    // Groups stay together on a node, as many on each.
    std::map<int, std::set<int>> nodes_of_group;
    std::map<int, std::set<int>> groups_of_node;
    for (int copy = 0; copy < map.physical(); ++copy) {
      const int node = map.placement().rank_of(copy) / (ranks / nodes), group = map.logical_of(copy) / (experts / groups);
      nodes_of_group[group].insert(node);
      groups_of_node[node].insert(group);
    }
    for (const auto& [group, on] : nodes_of_group) EXPECT_EQ(on.size(), 1u) << "group " << group;
    for (const auto& [node, held] : groups_of_node)
      EXPECT_EQ(held.size(), static_cast<std::size_t>(groups / nodes)) << "node " << node;
  }
}

/// The greedy rule is within a copy of the best there can be: the busiest rank has at most the mean and the largest copy, where
/// there is room to choose. And with copies it is no worse than without, but for that copy.
TEST(Balance, IsWithinABoundOfEven) {
  std::mt19937_64 random(balancing_test::announced_seed());
  for (int round = 0; round < 200; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 7), places = 4 + static_cast<int>(random() % 9);
    const int experts = ranks * (places - 1), extra = ranks;
    std::vector<double> loads(static_cast<std::size_t>(experts));
    for (double& load : loads) load = static_cast<double>(1 + random() % 1000);
    const ReplicaMap plain = balance_experts(loads, {ranks, 0, 1, {}}), map = balance_experts(loads, {ranks, extra, 1, {}});
    double largest = 0;
    for (int expert = 0; expert < experts; ++expert) {
      largest = std::max(largest, loads[static_cast<std::size_t>(expert)] / static_cast<double>(map.copies_of(expert).size()));
    }
    const double busiest = std::ranges::max(rank_loads(loads, map));
    EXPECT_LE(busiest, std::ranges::max(rank_loads(loads, plain)) + largest);
    EXPECT_LE(busiest, std::accumulate(loads.begin(), loads.end(), 0.0) / ranks + largest);
  }
}

TEST(Balance, CopiesOfAnExpertAreOnDifferentRanksWhereThatIsPossible) {
  std::mt19937_64 random(balancing_test::announced_seed());
  int repeated = 0, cases = 0;
  for (int round = 0; round < 300; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 7), places = 2 + static_cast<int>(random() % 9);
    const int physical = ranks * places,
              experts = places + static_cast<int>(random() % static_cast<unsigned>(physical - places + 1));
    std::vector<double> loads(static_cast<std::size_t>(experts));
    for (double& load : loads) load = std::pow(static_cast<double>(1 + random() % 1000), 2);
    const ReplicaMap map = balance_experts(loads, {ranks, physical - experts, 1, {}});
    repeated += repeats_on_a_rank(map) ? 1 : 0;
    ++cases;
  }
  EXPECT_LE(repeated, 0) << "of " << cases;
}

TEST(Balance, WhatCannotBePlaced) {
  const std::vector<double> two{1, 2};
  EXPECT_THROW(balance_experts(two, {0, 0, 1, {}}), InputError);
  EXPECT_THROW(balance_experts({}, {2, 0, 1, {}}), InputError);
  EXPECT_THROW(balance_experts(two, {2, 3, 1, {}}), InputError);
  EXPECT_THROW(balance_experts(two, {2, -1, 1, {}}), InputError);
  EXPECT_THROW(balance_experts(std::vector<double>{1, -2}, {2, 0, 1, {}}), InputError);
  EXPECT_THROW(balance_experts(two, {4, 1, 2, {}}), InputError) << "copies for one node only";
  EXPECT_THROW(balance_experts(two, {4, 0, 2, 1}), InputError) << "one group on two nodes";
  EXPECT_THROW(balance_experts(two, {3, 0, 2, {}}), InputError) << "nodes of different sizes";
  EXPECT_NO_THROW(balance_experts(two, {2, 2, 1, {}}));
  EXPECT_NO_THROW(balance_experts(two, {5, 0, 1, {}}));
  EXPECT_NO_THROW(balance_experts(two, {4, 2, 2, {}}));
}

TEST(Settle, WhatStaysStaysInItsPlace) {
  const ReplicaMap current = ReplicaMap::from_ranks({{0, 1}, {2, 3}, {4, 0}}, 5);
  const ReplicaMap wanted = ReplicaMap::from_ranks({{3, 2}, {4, 1}, {1, 0}}, 5);
  const ReplicaMap settled = settle(wanted, current);
  EXPECT_THAT(experts_of(settled, 0), ElementsAre(0, 1));
  EXPECT_THAT(experts_of(settled, 1), ElementsAre(2, 3));
  EXPECT_THAT(experts_of(settled, 2), ElementsAre(4, 1));
  EXPECT_THROW(settle(wanted, ReplicaMap::from_ranks({{0, 1, 2}, {2, 3, 4}}, 5)), InputError);
  EXPECT_THROW(settle(wanted, current, 2), InputError);
}

TEST(Settle, KeepsThePlacementAndMovesNoMore) {
  std::mt19937_64 random(balancing_test::announced_seed());
  const auto moves = [](const ReplicaMap& from, const ReplicaMap& to) {
    int count = 0;
    for (int copy = 0; copy < from.physical(); ++copy) count += from.logical_of(copy) != to.logical_of(copy) ? 1 : 0;
    return count;
  };
  for (int round = 0; round < 100; ++round) {
    const int nodes = 1 + static_cast<int>(random() % 2), ranks = nodes * (1 + static_cast<int>(random() % 4));
    const int experts = ranks * 4, extra = ranks > nodes ? ranks : 0;
    std::vector<double> loads(static_cast<std::size_t>(experts)), later = loads;
    for (double& load : loads) load = static_cast<double>(random() % 100);
    for (std::size_t i = 0; i < later.size(); ++i) later[i] = loads[i] + static_cast<double>(random() % 20);
    const ReplicaMap current = balance_experts(loads, {ranks, extra, nodes, {}}),
                     wanted = balance_experts(later, {ranks, extra, nodes, {}});
    const ReplicaMap settled = settle(wanted, current, nodes);
    EXPECT_LE(moves(current, settled), moves(current, wanted));
    EXPECT_EQ(moves(current, settle(current, current, nodes)), 0);
    std::vector<std::multiset<int>> a, b;
    for (int rank = 0; rank < ranks; ++rank) {
      a.emplace_back(settled.experts_of(rank).begin(), settled.experts_of(rank).end());
      b.emplace_back(wanted.experts_of(rank).begin(), wanted.experts_of(rank).end());
    }
    EXPECT_THAT(a, ::testing::UnorderedElementsAreArray(b));
  }
}

/// Steps to a placement: few places of a rank are changed at a time, to what is wanted there, and from_ranks would refuse a map
/// without some expert.
TEST(BalancingPartWay, GoesThereInSteps) {
  std::mt19937_64 random(balancing_test::announced_seed());
  for (int i = 0; i < 200; ++i) {
    const int ranks = 2 + static_cast<int>(random() % 4), experts = 12, places = (experts + ranks - 1) / ranks + 2;
    const int most = 1 + static_cast<int>(random() % static_cast<unsigned>(places));
    ReplicaMap now = balancing_test::random_map(random, experts, ranks, places);
    const ReplicaMap wanted = settle(balancing_test::random_map(random, experts, ranks, places), now);
    for (bool is_stuck = false; !(now == wanted) && !is_stuck;) {
      const ReplicaMap next = part_way(now, wanted, most);
      for (int rank = 0; rank < ranks; ++rank) {
        int changed = 0;
        for (int place = 0; place < places; ++place) {
          const auto at = static_cast<std::size_t>(place);
          if (now.experts_of(rank)[at] == next.experts_of(rank)[at]) continue;
          EXPECT_EQ(next.experts_of(rank)[at], wanted.experts_of(rank)[at]);
          ++changed;
        }
        EXPECT_LE(changed, most);
      }
      is_stuck = next == now;
      EXPECT_FALSE(is_stuck && most == places);
      now = next;
    }
  }
}

/// Of 60 changes of drawn loads, how many end where they were to: what docs/balancing.md says of memory for few experts.
TEST(BalancingPartWay, MemoryForFourIsEnoughForDrawnLoads) {
  for (const auto& [most, wanted_ends] : {std::pair(4, 60), std::pair(2, 51)}) {
    int ends = 0;
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      std::mt19937_64 random(seed);
      const std::vector<double> before = zipf_popularity(256, 1.0, random()), behind = zipf_popularity(256, 1.0, random());
      ReplicaMap now = balance_experts(before, {8, 32, 1, {}}), last;
      const ReplicaMap wanted = settle(balance_experts(behind, {8, 32, 1, {}}), now);
      while (!(now == last)) now = part_way(last = now, wanted, most);
      ends += now == wanted ? 1 : 0;
    }
    EXPECT_EQ(ends, wanted_ends) << "memory for " << most;
  }
}

TEST(BalancingPartWay, ExpertsWithoutCopiesChangePlacesTogether) {
  const ReplicaMap current = ReplicaMap::from_ranks({{0, 1}, {2, 3}, {4, 5}}, 6);
  const ReplicaMap wanted = ReplicaMap::from_ranks({{2, 3}, {4, 5}, {0, 1}}, 6);
  const ReplicaMap half = part_way(current, wanted, 1);
  EXPECT_THAT(experts_of(half, 0), ElementsAre(2, 1));
  EXPECT_THAT(experts_of(half, 1), ElementsAre(4, 3));
  EXPECT_THAT(experts_of(half, 2), ElementsAre(0, 5));
  EXPECT_TRUE(part_way(half, wanted, 1) == wanted);
  EXPECT_TRUE(part_way(current, wanted, 2) == wanted);
  const ReplicaMap turned = ReplicaMap::from_ranks({{1, 0}, {2, 3}, {4, 5}}, 6);
  EXPECT_TRUE(part_way(current, turned, 1) == current) << "two experts of one rank, and memory for one";
}

}  // namespace
}  // namespace heddle
