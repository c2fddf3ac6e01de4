// Greedy placements: every expert somewhere, no rank too full, loads as even as they can be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "heddle/error.hpp"
#include "replay/placed.hpp"

namespace heddle::replay {
namespace {

std::vector<double> loads_of_ranks(std::span<const double> loads, const Placed& placed) {
  std::vector<double> sums(static_cast<std::size_t>(placed.ranks()), 0.0);
  for (int expert = 0; expert < placed.experts(); ++expert) {
    const std::vector<int>& ranks = placed.ranks_of(expert);
    for (const int rank : ranks)
      sums[static_cast<std::size_t>(rank)] += loads[static_cast<std::size_t>(expert)] / static_cast<double>(ranks.size());
  }
  return sums;
}

TEST(Greedy, KnownLoadsComeOutEven) {
  const std::vector<double> loads{6, 5, 4, 3, 2, 1, 1, 2};  // 24: 12 on each of two ranks, four experts on each
  EXPECT_EQ(loads_of_ranks(loads, place_greedily(loads, 2, 0)), (std::vector<double>{12, 12}));
}

TEST(Greedy, ABusyExpertIsDivided) {
  const std::vector<double> loads{9, 1, 1, 1};
  EXPECT_EQ(std::ranges::max(loads_of_ranks(loads, place_greedily(loads, 2, 0))), 10);
  const Placed divided = place_greedily(loads, 2, 2);  // the first copy goes to expert 0, which is then everywhere
  EXPECT_THAT(divided.ranks_of(0), ::testing::UnorderedElementsAre(0, 1));
  EXPECT_EQ(loads_of_ranks(loads, divided), (std::vector<double>{6, 6}));
  for (int token = 0; token < 4; ++token)
    EXPECT_EQ(divided.rank_of(0, token), divided.ranks_of(0)[static_cast<std::size_t>(token % 2)]);
}

TEST(Greedy, RandomLoadsKeepTheRules) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const int experts = 1 + static_cast<int>(random() % 40), ranks = 1 + static_cast<int>(random() % 9);
    const int replicas = static_cast<int>(random() % static_cast<unsigned>(experts * (ranks - 1) + 1));
    std::vector<double> loads(static_cast<std::size_t>(experts));
    for (double& load : loads) load = random() % 3 == 0 ? 0.0 : static_cast<double>(random() % 1000);
    const Placed placed = place_greedily(loads, ranks, replicas);
    std::vector<int> held(static_cast<std::size_t>(ranks), 0);
    int copies = 0;
    for (int expert = 0; expert < experts; ++expert) {
      EXPECT_FALSE(placed.ranks_of(expert).empty());
      for (const int rank : placed.ranks_of(expert)) ++held[static_cast<std::size_t>(rank)];
      copies += static_cast<int>(placed.ranks_of(expert).size());
    }
    EXPECT_EQ(copies, experts + replicas);
    EXPECT_LE(std::ranges::max(held), (experts + replicas + ranks - 1) / ranks);
    const auto sums = loads_of_ranks(loads, placed);
    EXPECT_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0), std::accumulate(loads.begin(), loads.end(), 0.0), 1e-6);
  }
}

TEST(Greedy, WhatCannotBePlaced) {
  const std::vector<double> two{1, 2};
  EXPECT_THROW(place_greedily(two, 0, 0), InputError);
  EXPECT_THROW(place_greedily({}, 2, 0), InputError);
  EXPECT_THROW(place_greedily(two, 2, 3), InputError);
  EXPECT_THROW(place_greedily(two, 2, -1), InputError);
  EXPECT_THROW(place_greedily(std::vector<double>{1, -2}, 2, 0), InputError);
  EXPECT_NO_THROW(place_greedily(two, 2, 2));
  EXPECT_NO_THROW(place_greedily(two, 5, 0));
}

}  // namespace
}  // namespace heddle::replay
