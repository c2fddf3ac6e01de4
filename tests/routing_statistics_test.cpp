// Load statistics against plain counting and against numbers computed with NumPy from the same
// excerpts; the copies formulas; synthetic routings.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"

namespace {

using heddle::DrawOptions;
using heddle::Placement;
using heddle::Popularity;
using heddle::Recording;
using heddle::Routing;
using heddle::RoutingLoad;

const std::string data = std::string(HEDDLE_TEST_DATA) + "/routing/";

double max_over_mean(const std::map<int, std::int64_t>& loads, int count) {
  std::int64_t largest = 0, sum = 0;
  for (const auto& [key, load] : loads) largest = std::max(largest, load), sum += load;
  return static_cast<double>(largest) * count / static_cast<double>(sum);
}

/// Counts with sets and maps, and compares every field.
void expect_counted(const Routing& routing, const Placement& placement) {
  const RoutingLoad load = heddle::measure_load(routing, placement);
  std::map<int, std::int64_t> experts, ranks, copies;
  std::int64_t pairs = 0, all_copies = 0;
  for (int token = 0; token < routing.tokens; ++token) {
    std::set<int> needed;
    for (int choice = 0; choice < routing.topk; ++choice) {
      const int id = routing.ids[static_cast<std::size_t>(token * routing.topk + choice)];
      if (id < 0) continue;
      ++experts[id];
      ++ranks[placement.rank_of(id)];
      ++pairs;
      needed.insert(placement.rank_of(id));
    }
    for (const int rank : needed) ++copies[rank];
    all_copies += static_cast<std::int64_t>(needed.size());
  }
  EXPECT_EQ(load.pairs, pairs);
  EXPECT_EQ(load.copies, all_copies);
  EXPECT_DOUBLE_EQ(load.pairs_a_token, static_cast<double>(pairs) / routing.tokens);
  EXPECT_DOUBLE_EQ(load.copies_a_token, static_cast<double>(all_copies) / routing.tokens);
  for (int e = 0; e < placement.experts(); ++e) EXPECT_EQ(load.pairs_of_expert[static_cast<std::size_t>(e)], experts[e]);
  for (int r = 0; r < placement.ranks(); ++r) {
    EXPECT_EQ(load.pairs_of_rank[static_cast<std::size_t>(r)], ranks[r]);
    EXPECT_EQ(load.copies_of_rank[static_cast<std::size_t>(r)], copies[r]);
  }
  EXPECT_DOUBLE_EQ(load.expert_max_over_mean, max_over_mean(experts, placement.experts()));
  EXPECT_DOUBLE_EQ(load.rank_max_over_mean, max_over_mean(ranks, placement.ranks()));
  EXPECT_DOUBLE_EQ(load.copies_max_over_mean, max_over_mean(copies, placement.ranks()));
}

TEST(Load, OfTheExcerpts) {
  struct Known {  // from NumPy, contiguous placement on 8 ranks
    const char* file;
    int layer;
    double copies, expert, rank;
  };
  for (const Known& known : {Known{"esft_intent", 0, 4.5075, 4.1067, 1.1833},
                             {"esft_intent", 3, 4.4025, 3.6000, 1.5367},
                             {"esft_law", 0, 4.5500, 2.2133, 1.3133},
                             {"esft_law", 2, 4.4225, 4.1067, 1.5667},
                             {"gpt_oss_decode", 0, 3.5339, 2.2292, 1.3385},
                             {"gpt_oss_decode", 1, 3.6771, 4.5, 1.5625}}) {
    const Recording recording = Recording::open(data + known.file + ".ids.npy");
    const Routing routing = recording.take(known.layer, 0, recording.tokens());
    const Placement placement = Placement::contiguous(recording.least_experts(), 8);
    const RoutingLoad load = heddle::measure_load(routing, placement);
    EXPECT_NEAR(load.copies_a_token, known.copies, 5e-5);
    EXPECT_NEAR(load.expert_max_over_mean, known.expert, 5e-5);
    EXPECT_NEAR(load.rank_max_over_mean, known.rank, 5e-5);
    // Real routers stay near the formula in copies, and far from even in load.
    EXPECT_NEAR(load.copies_a_token, heddle::expected_copies(placement, recording.topk()), 0.35);
    EXPECT_GT(load.expert_max_over_mean, 1.9);
    EXPECT_GT(load.rank_max_over_mean, 1.1);
    expect_counted(routing, placement);
    expect_counted(routing, Placement::contiguous(recording.least_experts(), 5));
  }
}

TEST(Load, AnyPlacementAndMissingChoices) {
  const std::uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const int experts = 1 + static_cast<int>(random() % 40), ranks = 1 + static_cast<int>(random() % 12);
    std::vector<int> rank_of(static_cast<std::size_t>(experts));
    for (int& rank : rank_of) rank = static_cast<int>(random() % static_cast<unsigned>(ranks));
    DrawOptions options;
    options.tokens = 50;
    options.topk = std::min(experts, 4);
    options.seed = random();
    options.missing = 0.3;
    expect_counted(heddle::draw_routing(heddle::uniform_popularity(experts), options), Placement::from_map(rank_of, ranks));
  }
  const RoutingLoad nothing = heddle::measure_load(Routing{2, 2, {-1, -1, -1, -1}, {0, 0, 0, 0}}, Placement::contiguous(4, 2));
  EXPECT_EQ(nothing.copies, 0);
  EXPECT_EQ(nothing.rank_max_over_mean, 0.0);
  EXPECT_EQ(heddle::measure_load(Routing{}, Placement::contiguous(4, 2)).copies_a_token, 0.0);
  EXPECT_THROW(heddle::measure_load(Routing{1, 1, {4}, {1}}, Placement::contiguous(4, 2)), heddle::InputError);
}

TEST(Copies, Formulas) {
  const auto copies = [](int experts, int ranks, int k) {
    return heddle::expected_copies(Placement::contiguous(experts, ranks), k);
  };
  EXPECT_NEAR(copies(384, 8, 6), 4.43, 0.005);
  EXPECT_NEAR(copies(384, 4, 6), 3.30, 0.005);
  EXPECT_NEAR(copies(384, 64, 6), 5.81, 0.005);
  EXPECT_NEAR(heddle::expected_copies_independent(6, 8), 4.4, 0.05);
  EXPECT_DOUBLE_EQ(copies(384, 1, 6), 1.0);
  EXPECT_DOUBLE_EQ(copies(8, 8, 3), 3.0);  // an expert a rank: one copy a choice
  EXPECT_DOUBLE_EQ(copies(6, 3, 6), 3.0);  // every expert is chosen
  EXPECT_DOUBLE_EQ(heddle::expected_copies_independent(1, 8), 1.0);
  EXPECT_THROW(copies(4, 2, 5), heddle::InputError);
}

TEST(Copies, FormulaIsTheMeanOverAllChoices) {
  // All 4-subsets of 10 experts on 4 ranks of uneven size, one of them empty.
  const Placement placement = Placement::from_map({0, 0, 0, 0, 1, 1, 3, 3, 3, 1}, 4);
  double copies = 0, subsets = 0;
  for (unsigned mask = 0; mask < 1u << 10; ++mask) {
    std::set<int> ranks;
    int chosen = 0;
    for (int e = 0; e < 10; ++e) {
      if ((mask >> e & 1u) != 0) ++chosen, ranks.insert(placement.rank_of(e));
    }
    if (chosen != 4) continue;
    copies += static_cast<double>(ranks.size());
    ++subsets;
  }
  EXPECT_NEAR(heddle::expected_copies(placement, 4), copies / subsets, 1e-12);
}

Routing draw(const Popularity& popularity, int tokens, int topk, std::uint64_t seed, double missing = 0, float scale = 1) {
  return heddle::draw_routing(popularity, {tokens, topk, seed, missing, scale});
}

TEST(Draw, DistinctIdsAndPositiveWeights) {
  for (const int topk : {1, 6, 16}) {
    const Routing routing = draw(heddle::zipf_popularity(16, 1.2, 3), 300, topk, 11, 0.0, 2.5f);
    EXPECT_NO_THROW(heddle::check_choices(routing.ids, 300, topk, 16));
    EXPECT_EQ(std::ranges::count(routing.ids, -1), 0);
    for (int token = 0; token < 300; ++token) {
      const auto begin = routing.weights.begin() + token * topk;
      EXPECT_NEAR(std::accumulate(begin, begin + topk, 0.0f), 2.5f, 1e-5f);
      EXPECT_GT(*std::min_element(begin, begin + topk), 0.0f);
    }
  }
}

TEST(Draw, TheSameSeedGivesTheSameBits) {
  const Routing a = draw(heddle::uniform_popularity(64), 100, 6, 5), b = draw(heddle::uniform_popularity(64), 100, 6, 5);
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.weights, b.weights);
  EXPECT_NE(a.ids, draw(heddle::uniform_popularity(64), 100, 6, 6).ids);
  // Worked out apart from the library; a machine that gives other numbers draws other data from the same seed.
  EXPECT_EQ(draw(heddle::uniform_popularity(256), 2, 4, 2024).ids,
            (std::vector<std::int32_t>{236, 232, 221, 252, 219, 138, 103, 20}));
}

TEST(Draw, UniformSharesAndCopies) {
  const int tokens = 20000;
  const Routing routing = draw(heddle::uniform_popularity(64), tokens, 6, 17);
  const Placement placement = Placement::contiguous(64, 8);
  const RoutingLoad load = heddle::measure_load(routing, placement);
  EXPECT_NEAR(load.copies_a_token, heddle::expected_copies(placement, 6), 0.03);  // standard deviation 0.006
  for (const std::int64_t pairs : load.pairs_of_expert) EXPECT_NEAR(static_cast<double>(pairs), tokens * 6 / 64.0, 250);  // 41
}

TEST(Draw, FollowsPopularity) {
  // The first choice has exactly the given shares.
  const Popularity popularity = {1, 2, 0, 5};
  const Routing routing = draw(popularity, 40000, 1, 23);
  for (int e = 0; e < 4; ++e) {
    const double share = static_cast<double>(std::ranges::count(routing.ids, e)) / 40000;
    EXPECT_NEAR(share, popularity[static_cast<std::size_t>(e)] / 8, 0.015);  // standard deviation 0.0025
  }
  // The second choice has them among those that are left: after 3, 1 to 2.
  const Routing two = draw(popularity, 40000, 2, 29);
  double after_three = 0, then_zero = 0;
  for (std::size_t at = 0; at < two.ids.size(); at += 2) {
    if (two.ids[at] != 3) continue;
    ++after_three;
    then_zero += two.ids[at + 1] == 0 ? 1 : 0;
  }
  EXPECT_NEAR(then_zero / after_three, 1.0 / 3, 0.02);
  // Popularity 0 is drawn only when nothing else is left.
  EXPECT_EQ(std::ranges::count(draw(popularity, 1000, 3, 31).ids, 2), 0);
  EXPECT_EQ(std::ranges::count(draw(popularity, 1000, 4, 31).ids, 2), 1000);
}

TEST(Draw, Zipf) {
  const Popularity popularity = heddle::zipf_popularity(100, 1.0, 7);
  Popularity sorted = popularity;
  std::ranges::sort(sorted, std::greater<>());
  for (int n = 1; n <= 100; ++n) EXPECT_DOUBLE_EQ(sorted[static_cast<std::size_t>(n - 1)], 1.0 / n);
  EXPECT_NE(popularity, sorted);  // the favourites are not all on the first rank
  EXPECT_NE(popularity, heddle::zipf_popularity(100, 1.0, 8));
  EXPECT_EQ(heddle::zipf_popularity(9, 0.0, 1), heddle::uniform_popularity(9));
}

TEST(Draw, HotRank) {
  const Placement placement = Placement::contiguous(64, 8);
  const Popularity hot = heddle::hot_rank_popularity(placement, 5);
  const RoutingLoad within = heddle::measure_load(draw(hot, 200, 6, 1), placement);
  EXPECT_EQ(within.pairs_of_rank[5], 1200);
  EXPECT_EQ(within.copies, 200);
  const RoutingLoad beyond = heddle::measure_load(draw(hot, 200, 10, 1), placement);  // the rank has 8 experts
  EXPECT_EQ(beyond.pairs_of_rank[5], 1600);
  EXPECT_EQ(beyond.pairs, 2000);
  // A rank without experts: everything falls on the others.
  const Placement sparse = Placement::contiguous(2, 4);
  EXPECT_TRUE(sparse.experts_of(1).empty());
  EXPECT_NO_THROW(heddle::check_choices(draw(heddle::hot_rank_popularity(sparse, 1), 5, 2, 1).ids, 5, 2, 2));
}

TEST(Draw, MissingChoices) {
  const Routing routing = draw(heddle::uniform_popularity(32), 5000, 4, 3, 0.25);
  const double share = static_cast<double>(std::ranges::count(routing.ids, -1)) / 20000;
  EXPECT_NEAR(share, 0.25, 0.02);  // standard deviation 0.003
  for (std::size_t at = 0; at < routing.ids.size(); ++at) ASSERT_EQ(routing.weights[at] == 0.0f, routing.ids[at] < 0);
  for (int token = 0; token < 5000; ++token) {
    const auto begin = routing.weights.begin() + token * 4;
    const float sum = std::accumulate(begin, begin + 4, 0.0f);
    ASSERT_TRUE(sum == 0.0f || std::abs(sum - 1.0f) < 1e-5f);
  }
  EXPECT_EQ(std::ranges::count(draw(heddle::uniform_popularity(32), 50, 4, 3, 1.0).ids, -1), 200);
}

TEST(Draw, BadArguments) {
  EXPECT_THROW(draw(heddle::uniform_popularity(4), 1, 5, 0), heddle::InputError);
  EXPECT_THROW(draw(heddle::uniform_popularity(4), -1, 1, 0), heddle::InputError);
  EXPECT_THROW(draw(heddle::uniform_popularity(4), 1, 0, 0), heddle::InputError);
  EXPECT_THROW(draw(heddle::uniform_popularity(4), 1, 1, 0, 1.5), heddle::InputError);
  EXPECT_THROW(draw(heddle::uniform_popularity(4), 1, 1, 0, 0.0, 0.0f), heddle::InputError);
  EXPECT_THROW(draw({1, -1}, 1, 1, 0), heddle::InputError);
  EXPECT_THROW(draw({1, std::nan("")}, 1, 1, 0), heddle::InputError);
  EXPECT_THROW(heddle::uniform_popularity(0), heddle::InputError);
  EXPECT_THROW(heddle::zipf_popularity(4, INFINITY, 0), heddle::InputError);
  EXPECT_THROW(heddle::hot_rank_popularity(Placement::contiguous(4, 2), 2), heddle::InputError);
}

TEST(Counts, OfTheExcerptDriveTheDraw) {
  const std::vector<heddle::ExpertCounts> rows = heddle::read_expert_counts(data + "expert_counts.csv");
  ASSERT_EQ(rows.size(), 3u);
  for (const auto& row : rows) {
    const bool mixtral = row.model.starts_with("Mixtral");
    EXPECT_EQ(row.counts.size(), mixtral ? 8u : 64u);
    EXPECT_EQ(row.layer, 7);
    const double sum = std::accumulate(row.counts.begin(), row.counts.end(), 0.0);
    EXPECT_EQ(sum, static_cast<double>(row.tokens) * (mixtral ? 2 : 8));  // every token made its choices
  }
  const auto& arxiv = *std::ranges::find(rows, "arxiv", &heddle::ExpertCounts::domain);
  const Routing routing = draw(arxiv.counts, 20000, 1, 41);
  const double sum = std::accumulate(arxiv.counts.begin(), arxiv.counts.end(), 0.0);
  for (std::size_t e = 0; e < 64; ++e) {
    EXPECT_NEAR(static_cast<double>(std::ranges::count(routing.ids, static_cast<int>(e))) / 20000, arxiv.counts[e] / sum, 0.015);
  }
}

TEST(Counts, DamagedTables) {
  const auto path = std::filesystem::temp_directory_path() / ("heddle-counts-" + std::to_string(getpid()) + ".csv");
  const auto message = [&](const std::string& text) -> std::string {
    std::ofstream(path) << text;
    try {
      heddle::read_expert_counts(path.string());
    } catch (const heddle::InputError& error) {
      return error.what();
    }
    return "no error";
  };
  const std::string heading = "model,domain,layer,tokens,e0,e1\n";
  EXPECT_EQ(message(heading + "a,b,0,10,5,5\r\n\na,b,1,10,7,\n"), "no error");
  EXPECT_NE(message("").find("empty"), std::string::npos);
  EXPECT_NE(message("a,b\n1,2\n").find("line 1"), std::string::npos);
  EXPECT_NE(message(heading + "a,b,0,10,5\n").find("line 2: 5 cells, the heading has 6"), std::string::npos);
  EXPECT_NE(message(heading + "a,b,0,10,5,5\na,b,x,10,5,5\n").find("line 3: 'x' is not a number"), std::string::npos);
  EXPECT_NE(message(heading + "a,b,0,10,,\n").find("no counts"), std::string::npos);
  EXPECT_NE(message(heading + "a,b,0,10,-5,1\n").find("expert 0 has a count of -5"), std::string::npos);
  std::filesystem::remove(path);
  EXPECT_THROW(heddle::read_expert_counts(path.string()), heddle::InputError);
}

}  // namespace
