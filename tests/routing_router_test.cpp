// Router scores, choices and weights; placement; the check of choices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "heddle/error.hpp"
#include "heddle/routing.hpp"

namespace {

using heddle::Placement;
using heddle::RouterOptions;
using heddle::Routing;
using heddle::Score;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
using Ids = std::vector<std::int32_t>;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const heddle::InputError& error) {
    return error.what();
  }
  return "no error";
}

bool mentions(const std::string& message, std::initializer_list<const char*> words) {
  return std::ranges::all_of(words, [&](const char* word) { return message.find(word) != std::string::npos; });
}

RouterOptions options(Score score, int topk, bool renormalise = true, float scale = 1.0f) {
  return {score, topk, 1, 1, renormalise, scale};
}

/// Scores in double, straight from the definitions.
std::vector<double> scores_of(const std::vector<float>& logits, Score score) {
  std::vector<double> out(logits.begin(), logits.end());
  if (score == Score::softmax) {
    double sum = 0;
    for (double& v : out) sum += v = std::exp(v);
    for (double& v : out) v /= sum;
  } else if (score == Score::sigmoid) {
    for (double& v : out) v = 1 / (1 + std::exp(-v));
  } else if (score == Score::sqrtsoftplus) {
    for (double& v : out) v = std::sqrt(v > 20 ? v : std::log(1 + std::exp(v)));
  }
  return out;
}

/// Is any difference so small that f32 may order the two the other way?
bool has_near_tie(std::vector<double> values) {
  std::ranges::sort(values);
  return std::ranges::adjacent_find(values, [](double a, double b) { return b - a < 1e-6; }) != values.end();
}

std::vector<double> group_scores_of(const std::vector<double>& selection, int groups) {
  const int size = static_cast<int>(selection.size()) / groups;
  std::vector<double> scores;
  for (int g = 0; g < groups; ++g) {
    std::vector<double> members(selection.begin() + g * size, selection.begin() + (g + 1) * size);
    std::ranges::sort(members, std::greater<>());
    scores.push_back(members[0] + (size > 1 ? members[1] : 0.0));
  }
  return scores;
}

/// k rounds of "the best that is left", groups first.
Ids slow_choices(const std::vector<double>& selection, const RouterOptions& o) {
  const int experts = static_cast<int>(selection.size()), size = experts / o.groups;
  std::vector<double> group_scores = group_scores_of(selection, o.groups);
  const auto take_best = [](std::vector<double>& values) {
    const auto best = std::ranges::max_element(values);  // the first of equals
    *best = -std::numeric_limits<double>::infinity();
    return static_cast<int>(best - values.begin());
  };
  std::vector<double> allowed(selection.size(), -std::numeric_limits<double>::infinity());
  for (int i = 0; i < o.topk_groups; ++i) {
    const int g = take_best(group_scores);
    std::copy_n(selection.begin() + g * size, size, allowed.begin() + g * size);
  }
  Ids ids;
  for (int i = 0; i < o.topk; ++i) ids.push_back(take_best(allowed));
  return ids;
}

TEST(Route, FollowsTheDefinitions) {
  const std::uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  int compared = 0;
  for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::softmax_topk}) {
    for (int repeat = 0; repeat < 60; ++repeat) {
      RouterOptions o = options(score, 1 + static_cast<int>(random() % 8), random() % 2 == 0, 2.5f);
      const bool grouped = (score == Score::sigmoid || score == Score::sqrtsoftplus) && random() % 2 == 0;
      if (grouped) o.groups = 8, o.topk_groups = 4;
      std::vector<float> logits(64), bias(random() % 2 == 0 ? 64 : 0);
      for (float& v : logits) v = normal(random);
      for (float& v : bias) v = 0.1f * normal(random);
      const Routing routing = heddle::route(logits, bias, 1, 64, o);

      const std::vector<double> scores = scores_of(logits, score);
      std::vector<double> selection = scores;
      for (std::size_t e = 0; e < bias.size(); ++e) selection[e] += double{bias[e]};
      if (has_near_tie(selection) || has_near_tie(group_scores_of(selection, o.groups))) continue;
      ++compared;
      ASSERT_EQ(routing.ids, slow_choices(selection, o));
      std::vector<double> weights;
      for (const int id : routing.ids) weights.push_back(scores[static_cast<std::size_t>(id)]);
      if (score == Score::softmax_topk) {
        for (double& w : weights) w = std::exp(w);
      }
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      const double divisor = score == Score::softmax_topk || o.renormalise ? sum : 1.0;
      for (std::size_t i = 0; i < weights.size(); ++i) ASSERT_NEAR(routing.weights[i], weights[i] / divisor * 2.5, 1e-5);
    }
  }
  EXPECT_GT(compared, 4 * 60 / 2);
}

TEST(Route, BiasSelectsOnly) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 0.5f}, bias = {0.0f, 0.0f, 5.0f, 0.0f};
  const Routing routing = heddle::route(logits, bias, 1, 4, options(Score::sigmoid, 2, false));
  EXPECT_EQ(routing.ids, (Ids{2, 1}));
  EXPECT_NEAR(routing.weights[0], 1 / (1 + std::exp(1.0)), 1e-6);
}

TEST(Route, TiesGoToTheLowerIdAndZerosOfBothSignsAreEqual) {
  const std::vector<float> logits = {-0.0f, 0.0f, 1.0f, 1.0f, -0.0f, 1.0f};
  EXPECT_EQ(heddle::route(logits, {}, 1, 6, options(Score::softmax_topk, 5)).ids, (Ids{2, 3, 5, 0, 1}));
}

TEST(Route, NanRanksLowest) {
  const std::vector<float> logits = {nan_value, -50.0f, 1.0f, nan_value, -200.0f};
  for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::softmax_topk}) {
    const Routing routing = heddle::route(logits, {}, 1, 5, options(score, 3));
    EXPECT_EQ(routing.ids, (Ids{2, 1, 4}));
    EXPECT_NEAR(routing.weights[0], 1.0f, 1e-5);
    EXPECT_EQ(heddle::route(logits, {}, 1, 5, options(score, 5)).ids, (Ids{2, 1, 4, 0, 3}));
  }
  const std::vector<float> even = {1.0f, 2.0f, 3.0f}, bias = {0.0f, 0.0f, nan_value};
  EXPECT_EQ(heddle::route(even, bias, 1, 3, options(Score::sigmoid, 2)).ids, (Ids{1, 0}));
}

TEST(Route, GroupLimitLeavesOutTheBestExpertOfAPoorGroup) {
  // Group 1 has the single best expert, but the two best of groups 0 and 2 add up to more.
  const std::vector<float> logits = {2, 2, 0, 3, -9, -9, 1.9f, 1.9f, 0};
  RouterOptions o = options(Score::sigmoid, 3);
  o.groups = 3;
  o.topk_groups = 2;
  EXPECT_EQ(heddle::route(logits, {}, 1, 9, o).ids, (Ids{0, 1, 6}));
}

TEST(Route, ExtremeLogits) {
  const std::vector<float> logits = {1000.0f, -1000.0f, 999.0f, 25.0f};
  for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrtsoftplus, Score::softmax_topk}) {
    for (const float w : heddle::route(logits, {}, 1, 4, options(score, 4)).weights) EXPECT_TRUE(std::isfinite(w) && w >= 0.0f);
  }
  const Routing plus = heddle::route(logits, {}, 1, 4, options(Score::sqrtsoftplus, 4, false));
  EXPECT_EQ(plus.ids, (Ids{0, 2, 3, 1}));
  EXPECT_EQ(plus.weights[2], 5.0f);  // above 20 softplus(x) is x
  EXPECT_EQ(plus.weights[3], 0.0f);
  // All scores 0: the sum is kept from zero, so weights are 0 and not NaN.
  EXPECT_EQ(heddle::route(std::vector<float>(4, -1000.0f), {}, 1, 4, options(Score::sigmoid, 2)).weights,
            (std::vector<float>{0, 0}));
}

TEST(Route, ImpossibleOptions) {
  const std::vector<float> logits(12, 0.0f);
  const auto refuse = [&](RouterOptions o, std::initializer_list<const char*> words) {
    const std::string message = message_of([&] { heddle::route(logits, {}, 1, 12, o); });
    EXPECT_TRUE(mentions(message, words)) << message;
  };
  refuse({Score::softmax, 13, 1, 1, true, 1}, {"13", "12"});
  refuse({Score::softmax, 0, 1, 1, true, 1}, {"top-k is 0"});
  refuse({Score::sigmoid, 2, 5, 2, true, 1}, {"12 experts", "5 groups"});
  refuse({Score::sigmoid, 7, 4, 2, true, 1}, {"top-k is 7", "1 to 6"});
  refuse({Score::sigmoid, 2, 4, 5, true, 1}, {"5 groups", "of 4"});
  refuse({Score::softmax, 2, 4, 2, true, 1}, {"softmax"});
  EXPECT_TRUE(mentions(message_of([&] { heddle::route(logits, std::vector<float>(3), 1, 12, {}); }), {"bias", "3", "12"}));
  EXPECT_TRUE(mentions(message_of([&] { heddle::route(logits, {}, 2, 12, {}); }), {"12 logits", "2 tokens"}));
}

TEST(RouterLogits, SumsInF32AndDoesNotDependOnTheBatch) {
  const std::uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const int hidden : {640, 64, 21}) {
    const int tokens = 5, experts = 13;
    std::vector<heddle::bf16> states(static_cast<std::size_t>(tokens * hidden));
    std::vector<float> weights(static_cast<std::size_t>(experts * hidden));
    for (auto& v : states) v = heddle::to_bf16(normal(random));
    for (float& w : weights) w = heddle::to_float(heddle::to_bf16(normal(random)));
    const std::vector<float> logits = heddle::router_logits(states, weights, tokens, hidden, experts);
    for (int t = 0; t < tokens; ++t) {
      const auto row = std::span(states).subspan(static_cast<std::size_t>(t * hidden), static_cast<std::size_t>(hidden));
      const std::vector<float> alone = heddle::router_logits(row, weights, 1, hidden, experts);
      for (int e = 0; e < experts; ++e) {
        double exact = 0, magnitudes = 0;
        for (int i = 0; i < hidden; ++i) {
          const double term =
              double{heddle::to_float(row[static_cast<std::size_t>(i)])} * weights[static_cast<std::size_t>(e * hidden + i)];
          exact += term;
          magnitudes += std::abs(term);
        }
        ASSERT_NEAR(logits[static_cast<std::size_t>(t * experts + e)], exact, 1e-6 * magnitudes);
        ASSERT_EQ(logits[static_cast<std::size_t>(t * experts + e)], alone[static_cast<std::size_t>(e)]);
      }
    }
  }
  EXPECT_THROW(heddle::router_logits({}, std::vector<float>(6), 1, 3, 2), heddle::InputError);
}

TEST(Placement, Contiguous) {
  for (const auto& [experts, ranks] : std::vector<std::pair<int, int>>{{384, 8}, {64, 3}, {5, 8}, {1, 1}, {7, 72}}) {
    const Placement placement = Placement::contiguous(experts, ranks);
    ASSERT_EQ(placement.experts(), experts);
    ASSERT_EQ(placement.ranks(), ranks);
    int seen = 0, most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto own = placement.experts_of(rank);
      most = std::max(most, static_cast<int>(own.size()));
      for (std::size_t i = 0; i < own.size(); ++i, ++seen) {
        ASSERT_EQ(own[i], seen);  // contiguous, ascending, each once
        ASSERT_EQ(placement.rank_of(own[i]), seen * ranks / experts);
        ASSERT_EQ(placement.rank_of(own[i]), rank);
        ASSERT_EQ(placement.local_index(own[i]), static_cast<int>(i));
      }
    }
    ASSERT_EQ(seen, experts);
    ASSERT_EQ(placement.max_local_experts(), most);
  }
}

TEST(Placement, FromMap) {
  const Placement placement = Placement::from_map({2, 0, 2, 2, 0}, 4);
  EXPECT_TRUE(std::ranges::equal(placement.experts_of(0), std::vector{1, 4}));
  EXPECT_TRUE(placement.experts_of(1).empty());
  EXPECT_TRUE(std::ranges::equal(placement.experts_of(2), std::vector{0, 2, 3}));
  EXPECT_TRUE(placement.experts_of(3).empty());
  EXPECT_EQ(placement.local_index(3), 2);
  EXPECT_EQ(placement.max_local_experts(), 3);
  EXPECT_TRUE(mentions(message_of([] { Placement::from_map({0, 4}, 4); }), {"expert 1", "rank 4", "0 to 3"}));
  EXPECT_THROW(Placement::from_map({0, -1}, 4), heddle::InputError);
  EXPECT_THROW(Placement::contiguous(0, 4), heddle::InputError);
  EXPECT_THROW(Placement::contiguous(4, 0), heddle::InputError);
}

TEST(CheckChoices, NamesTokenChoiceAndId) {
  EXPECT_NO_THROW(heddle::check_choices(Ids{0, 1, 7, -1, -1, -1, 3, 0}, 4, 2, 8));
  EXPECT_NO_THROW(heddle::check_choices({}, 0, 2, 8));
  EXPECT_TRUE(mentions(message_of([] {
                         heddle::check_choices(Ids{0, 1, 2, 8}, 2, 2, 8);
                       }),
                       {"token 1", "choice 1", "id 8", "[-1, 8)"}));
  EXPECT_TRUE(mentions(message_of([] { heddle::check_choices(Ids{-2, 1}, 1, 2, 8); }), {"token 0", "choice 0", "id -2"}));
  EXPECT_TRUE(mentions(message_of([] {
                         heddle::check_choices(Ids{1, 2, 3, 5, -1, 5}, 2, 3, 8);
                       }),
                       {"token 1", "choice 2", "expert 5", "choice 0"}));
  EXPECT_THROW(heddle::check_choices(Ids{1, 2, 3}, 2, 2, 8), heddle::InputError);
}

}  // namespace
