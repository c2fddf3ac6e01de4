// Which copy a pair takes: shares against a dealing row by row, the same on all ranks, and what the recordings come to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "balancing_support.hpp"
#include "heddle/balancing.hpp"
#include "heddle/error.hpp"
#include "replay/replay.hpp"

namespace heddle {
namespace {

using ::testing::ElementsAre;

std::size_t index(int value) { return static_cast<std::size_t>(value); }

/// The rule in its own words: rows one by one, two rounds.
std::vector<int> dealt_row_by_row(const ReplicaMap& map, int source, const std::vector<int>& counts) {
  std::vector<int> shares(index(map.physical()), 0), rows(index(map.ranks()), 0);
  const auto give = [&](int copy, int count) {
    shares[index(copy)] += count;
    rows[index(map.placement().rank_of(copy))] += count;
  };
  for (int expert = 0; expert < map.experts(); ++expert) {
    if (map.copies_of(expert).size() == 1) give(map.copies_of(expert)[0], counts[index(expert)]);
  }
  for (int round = 0; round < 2; ++round) {
    for (int expert = 0; expert < map.experts(); ++expert) {
      const auto copies = map.copies_of(expert);
      if (copies.size() == 1) continue;
      for (const int copy : copies) give(copy, -shares[index(copy)]);
      // Copies on one rank have one level: their rows count for the rank once the expert is dealt.
      std::vector<int> level, got(copies.size(), 0);
      for (const int copy : copies) level.push_back(rows[index(map.placement().rank_of(copy))]);
      for (int row = 0; row < counts[index(expert)]; ++row) {
        std::size_t best = 0;
        for (std::size_t i = 1; i < copies.size(); ++i) {
          const auto place = [&](std::size_t copy) {
            return (map.placement().rank_of(copies[copy]) - source % map.ranks() + map.ranks()) % map.ranks();
          };
          const int a = level[i] + got[i], b = level[best] + got[best];
          if (a < b || (a == b && place(i) < place(best))) best = i;
        }
        ++got[best];
      }
      for (std::size_t i = 0; i < copies.size(); ++i) give(copies[i], got[i]);
    }
  }
  return shares;
}

TEST(Shares, AreThoseOfADealingRowByRow) {
  std::mt19937_64 random(balancing_test::announced_seed());
  for (int round = 0; round < 300; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 9), places = 1 + static_cast<int>(random() % 6);
    const int experts = 1 + static_cast<int>(random() % static_cast<unsigned>(ranks * places));
    const ReplicaMap map = balancing_test::random_map(random, experts, ranks, places);
    const int source = static_cast<int>(random() % 12);
    std::vector<int> counts(index(experts));
    const unsigned most = 1 + static_cast<unsigned>(random() % 60);
    for (int& count : counts) count = static_cast<int>(random() % most);
    EXPECT_EQ(share_rows(map, CopyRule::levelled, source, counts), dealt_row_by_row(map, source, counts));
  }
}

TEST(Shares, OfTurnsDifferByOneAtMost) {
  std::mt19937_64 random(balancing_test::announced_seed());
  for (int round = 0; round < 200; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 6), experts = 1 + static_cast<int>(random() % 12);
    const ReplicaMap map = balancing_test::random_map(random, experts, ranks, 12);
    std::vector<int> counts(index(experts));
    for (int& count : counts) count = static_cast<int>(random() % 40);
    const int source = static_cast<int>(random() % 8);
    const std::vector<int> shares = share_rows(map, CopyRule::turns, source, counts);
    for (int expert = 0; expert < experts; ++expert) {
      std::vector<int> own;
      for (const int copy : map.copies_of(expert)) own.push_back(shares[index(copy)]);
      EXPECT_EQ(std::accumulate(own.begin(), own.end(), 0), counts[index(expert)]);
      EXPECT_LE(std::ranges::max(own) - std::ranges::min(own), 1);
      const auto first = index((source + expert) % static_cast<int>(own.size()));
      EXPECT_EQ(own[first], std::ranges::max(own)) << "the longer turns begin there";
    }
  }
}

TEST(Choice, FollowsTheSharesInOrder) {
  const ReplicaMap map = ReplicaMap::from_ranks({{0, 1}, {0, 2}}, 3);  // copies of expert 0: 0 on rank 0, 2 on rank 1
  const std::vector<std::int32_t> ids{0, 1, 0, -1, 1, 0, 0, 2};
  std::vector<std::int32_t> chosen(ids.size());
  std::vector<std::int64_t> counts{10, 0, 0};
  // Rank 0 has two rows of expert 1, rank 1 one of expert 2: of four rows of expert 0 one goes to rank 0 before the ranks are even,
  // and three are left over two.
  choose_copies(map, CopyRule::levelled, 0, ids, chosen, counts);
  EXPECT_THAT(chosen, ElementsAre(0, 1, 0, -1, 1, 2, 2, 3));
  EXPECT_THAT(counts, ElementsAre(14, 2, 1));
  choose_copies(map, CopyRule::levelled, 0, chosen = ids, chosen, counts);
  EXPECT_THAT(chosen, ElementsAre(0, 1, 0, -1, 1, 2, 2, 3)) << "in place";
  std::vector<std::int32_t> bad{0, 3};
  EXPECT_THROW(choose_copies(map, CopyRule::levelled, 0, bad, bad, counts), InputError);
  std::vector<std::int64_t> few(2);
  EXPECT_THROW(choose_copies(map, CopyRule::turns, 0, ids, chosen, few), InputError);
  EXPECT_THROW(choose_copies(map, CopyRule::turns, Routing{4, 2, ids, std::vector<float>(8)}, std::vector<int>{1, 2}), InputError);
}

TEST(Choice, IsTheSameWhereverItIsWorkedOut) {
  std::mt19937_64 random(balancing_test::announced_seed());
  const ReplicaMap map = balancing_test::random_map(random, 16, 4, 6);
  const Routing routing = draw_routing(zipf_popularity(16, 1.0, random()), {40, 4, random(), 0.1, 1.0f});
  const std::vector<int> homes{13, 0, 20, 7};
  const Routing all = choose_copies(map, CopyRule::levelled, routing, homes);
  for (int rank = 0, first = 0; rank < 4; first += homes[index(rank++)]) {
    const auto part = std::span(routing.ids).subspan(index(first * 4), index(homes[index(rank)] * 4));
    std::vector<std::int32_t> chosen(part.size());
    std::vector<std::int64_t> counts(16);
    choose_copies(map, CopyRule::levelled, rank, part, chosen, counts);
    EXPECT_TRUE(std::equal(chosen.begin(), chosen.end(), all.ids.begin() + first * 4)) << "rank " << rank;
  }
  for (std::size_t i = 0; i < routing.ids.size(); ++i) {
    EXPECT_EQ(all.ids[i] < 0 ? -1 : map.logical_of(all.ids[i]), routing.ids[i]);
  }
}

/// What the issue asks for, on the recordings that come with the tests: 32 more experts over 8 ranks.
TEST(Recordings, ComeOutEvenWith32MoreExperts) {
  const std::string data = std::string(HEDDLE_TEST_DATA) + "/routing/";
  for (const char* file : {"esft_law.ids.npy", "esft_intent.ids.npy"}) {
    const Recording recording = Recording::open(data + file);
    const int tokens = recording.tokens() / 2;
    const replay::Source source = replay::source_of(recording, {8, 64, tokens, {}, 1});
    std::vector<int> layers(static_cast<std::size_t>(recording.layers()));
    std::iota(layers.begin(), layers.end(), 0);
    const replay::ReplayResult result = replay::replay(source, {8, 32, layers, {}, {}});
    ASSERT_EQ(result.unseen.size(), 3u);
    EXPECT_GT(result.unseen[0].step_max_over_mean(), 1.3) << file << ", contiguous";
    EXPECT_LT(result.placements[2].step_max_over_mean(), 1.05) << file;
    EXPECT_LT(result.unseen[2].step_max_over_mean(), 1.05) << file << ", a step that the placement has not seen";
  }
}

}  // namespace
}  // namespace heddle
