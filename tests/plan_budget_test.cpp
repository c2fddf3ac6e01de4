// The token budget: the articles' numbers, what it refuses and with which words, and the plan made from it.
#include "heddle/budget.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/plan.hpp"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

/// 64 requests at most with 4 draft tokens each, and a chunk that 8 groups share.
TokenBudget engine_budget() {
  return {.decode_graphs = {1, 2, 64, 32}, .speculative_rows = 4, .prefill_chunk = 65536, .data_parallel_groups = 8};
}

PlanRequest flash(int ranks) {
  PlanRequest request;
  request.shape = find_preset("deepseek-v4-flash").shape;
  request.weights = WeightKind::mxfp4;
  request.ranks = ranks;
  request.wire = Wire::fp8;
  request.machine = find_machine("h200");
  return request;
}

TEST(TokenBudget, IsTheArticlesNumbers) {
  const TokenBound bound = token_bound(engine_budget());
  EXPECT_EQ(8192, bound.prefill);  // fused-kernel article, 5.2: a chunk of 65,536 on 8 groups
  EXPECT_EQ(256, bound.decode);    // exchange-ways article, 9.2: 64 requests with 4 draft tokens need 256 rows
  EXPECT_EQ(8192, bound.cap());
  EXPECT_NO_THROW(check_cap(engine_budget(), 8320));  // 5.2: the cap of that recipe
  EXPECT_EQ(9600, fused_cap(8320));                   // and what the kernel described there rounds it up to
}

TEST(TokenBudget, TakesTheLargestGraphWhereverItStands) {
  TokenBudget budget = engine_budget();
  for (const std::vector<int>& graphs : {std::vector{64}, {64, 1}, {1, 64}, {1, 64, 8}}) {
    budget.decode_graphs = graphs;
    EXPECT_EQ(256, token_bound(budget).decode);
  }
}

TEST(TokenBudget, EveryFactorCounts) {
  TokenBudget budget = engine_budget();
  budget.request_tokens = 3;
  EXPECT_EQ(64 * 3 * 4, token_bound(budget).decode);
  budget.speculative_rows = 1;
  EXPECT_EQ(64 * 3, token_bound(budget).decode);
  budget.data_parallel_groups = 1;
  EXPECT_EQ(65536, token_bound(budget).prefill);
  EXPECT_EQ(64 * 3, token_bound(budget).decode) << "a graph's size is a group's already";
}

TEST(TokenBudget, AGroupMayTakeTheTokensThatAreLeftOver) {
  TokenBudget budget = engine_budget();
  budget.prefill_chunk = 65537;
  EXPECT_EQ(8193, token_bound(budget).prefill);
  budget.prefill_chunk = 1;
  EXPECT_EQ(1, token_bound(budget).prefill);
  budget.prefill_chunk = std::numeric_limits<int>::max();
  budget.data_parallel_groups = 4096;
  EXPECT_EQ(524288, token_bound(budget).prefill);
}

TEST(TokenBudget, TheGreaterKindOfStepDecides) {
  TokenBudget budget = engine_budget();
  budget.prefill_chunk = 64;
  EXPECT_EQ(8, token_bound(budget).prefill);
  EXPECT_EQ(256, token_bound(budget).cap());
  budget.prefill_chunk.reset();  // ranks that only decode
  EXPECT_EQ(0, token_bound(budget).prefill);
  EXPECT_EQ(256, token_bound(budget).cap());
  budget = engine_budget();
  budget.decode_graphs.clear();  // ranks that only prefill
  EXPECT_EQ(0, token_bound(budget).decode);
  EXPECT_EQ(8192, token_bound(budget).cap());
}

TEST(TokenBudget, RefusesChunksThatAreNotBounded) {
  for (const int chunk : {-1, 0, -4096}) {
    TokenBudget budget = engine_budget();
    budget.prefill_chunk = chunk;
    const std::string given = "a prefill chunk of " + std::to_string(chunk) + " is no bound";
    const auto refused =
        ThrowsMessage<InputError>(AllOf(HasSubstr(given), HasSubstr("over 8 data-parallel groups, such as 65536")));
    EXPECT_THAT([&] { token_bound(budget); }, refused);
    EXPECT_THAT([&] { check_cap(budget, largest_cap); }, refused) << "no cap is large enough";
    EXPECT_THAT([&] { make_budget_plan(budget, flash(8)); }, refused);
  }
}

TEST(TokenBudget, RefusesWhatBoundsNothing) {
  const auto refused = [](auto change, const char* part) {
    TokenBudget budget = engine_budget();
    change(budget);
    EXPECT_THAT([&] { token_bound(budget); }, ThrowsMessage<InputError>(HasSubstr(part))) << part;
  };
  refused(
      [](TokenBudget& b) {
        b.decode_graphs.clear();
        b.prefill_chunk.reset();
      },
      "bounds nothing");
  refused([](TokenBudget& b) { b.decode_graphs = {64, 0}; }, "size of a decode graph is 0");
  refused([](TokenBudget& b) { b.request_tokens = 0; }, "number of tokens a request is 0");
  refused([](TokenBudget& b) { b.speculative_rows = -1; }, "number of speculative rows is -1");
  refused([](TokenBudget& b) { b.data_parallel_groups = 0; }, "number of data-parallel groups is 0");
  refused([](TokenBudget& b) { b.prefill_chunk = 8 * largest_cap + 1; }, "1048577 tokens to a prefill step");
  const int most = largest_cap;  // the largest product of all has 61 bits
  refused([=](TokenBudget& b) { b = {{most}, most, most, {}, 1}; }, "1152921504606846976 tokens to a decode step");
}

TEST(TokenBudget, ACapThatIsTooSmallIsToldWhatWouldFit) {
  EXPECT_NO_THROW(check_cap(engine_budget(), 8192));
  EXPECT_THAT(
      [] { check_cap(engine_budget(), 4096); },
      ThrowsMessage<InputError>("a rank can bring 8192 tokens to a prefill step (65,536 tokens / 8 data-parallel groups), but "
                                "the cap is 4096; take a cap of at least 8192, or prefill in chunks of at most 32768"));
  EXPECT_THAT([] { check_cap(engine_budget(), 130); },
              ThrowsMessage<InputError>(
                  AllOf(HasSubstr("256 tokens to a decode step (64 requests in the largest graph x 1 token x 4 speculative rows) "
                                  "and 8192 tokens to a prefill"),
                        HasSubstr("at least 8192, or capture decode graphs of at most 32 and prefill in chunks of at most 1040"))));
  // With 3 tokens not one request of 4 rows fits: only a larger cap helps.
  EXPECT_THAT([] { check_cap(engine_budget(), 3); },
              ThrowsMessage<InputError>(AllOf(HasSubstr("at least 8192"), Not(HasSubstr("or capture")))));
}

TEST(TokenBudget, AChunkThatDoesNotDivideIsSaidToBeRoundedUp) {
  TokenBudget budget = engine_budget();
  EXPECT_THAT([&] { check_cap(budget, 1); }, ThrowsMessage<InputError>(Not(HasSubstr("rounded up"))));
  budget.prefill_chunk = 65537;
  EXPECT_THAT(
      [&] { check_cap(budget, 1); },
      ThrowsMessage<InputError>(HasSubstr("8193 tokens to a prefill step (65,537 tokens / 8 data-parallel groups, rounded up)")));
}

TEST(TokenBudget, WhatTheErrorSaysWouldFitDoesFit) {
  TokenBudget budget = engine_budget();
  budget.decode_graphs = {32};
  budget.prefill_chunk = 1040;
  EXPECT_NO_THROW(check_cap(budget, 130));
  budget.decode_graphs = {33};
  EXPECT_THROW(check_cap(budget, 130), InputError);
  budget.decode_graphs = {32};
  budget.prefill_chunk = 1041;
  EXPECT_THROW(check_cap(budget, 130), InputError);
}

// ------------------------------------------------------------------ the plan

std::map<std::string, double> numbers_of(const Plan& plan) {
  std::map<std::string, double> numbers;
  for (const Section& section : plan.sections) {
    EXPECT_FALSE(section.quantities.empty()) << section.name;
    for (const Quantity& quantity : section.quantities) {
      EXPECT_TRUE(numbers.emplace(section.name + "." + quantity.name, quantity.value).second) << quantity.name;
      EXPECT_FALSE(quantity.formula.empty()) << quantity.name;
      EXPECT_FALSE(quantity.source.empty()) << quantity.name;
    }
  }
  return numbers;
}

// A layer that is made with the suggested cap has the workspace that the budget's plan names, and so has one for decode steps.
TEST(BudgetPlan, MemoryOfEveryWayIsThatOfTheCap) {
  const auto numbers = numbers_of(make_budget_plan(engine_budget(), flash(8)));
  EXPECT_EQ(256, numbers.at("budget.decode"));
  EXPECT_EQ(8192, numbers.at("budget.prefill"));
  EXPECT_EQ(8192, numbers.at("budget.cap"));
  PlanRequest capped = flash(8), decode = flash(8);
  capped.tokens = capped.cap = 8192;
  decode.tokens = decode.cap = 256;
  const auto whole = numbers_of(make_plan(capped));
  for (const char* way : {"gather", "normal", "low_latency", "elastic", "one_sided", "mega"}) {
    const std::string name = way;
    EXPECT_EQ(whole.at("own_layouts." + name), numbers.at("own_layouts." + name)) << way;
    EXPECT_EQ(whole.at("article_buffers." + name + ".total"), numbers.at("article_buffers." + name + ".total")) << way;
    EXPECT_EQ(numbers_of(make_plan(decode)).at("own_layouts." + name), numbers.at("decode_layouts." + name)) << way;
  }
  EXPECT_EQ(480470592, numbers.at("mega_buffer.live.total"));  // as docs/planning.md has it for this cap
  EXPECT_EQ(whole.at("mega_buffer.full.total"), numbers.at("mega_buffer.full.total"));
  EXPECT_GT(numbers.at("own_layouts.low_latency"), 30 * numbers.at("decode_layouts.low_latency"));
}

TEST(BudgetPlan, AGivenCapIsCheckedAndTaken) {
  const Plan plan = make_budget_plan(engine_budget(), flash(8), 8320);
  const auto numbers = numbers_of(plan);
  EXPECT_EQ(8320, plan.request.cap);
  EXPECT_EQ(8192, plan.request.tokens);
  EXPECT_EQ(8192, numbers.at("budget.cap"));
  EXPECT_GT(numbers.at("own_layouts.gather"), numbers_of(make_budget_plan(engine_budget(), flash(8))).at("own_layouts.gather"));
  EXPECT_THAT([] { make_budget_plan(engine_budget(), flash(8), 4096); }, ThrowsMessage<InputError>(HasSubstr("at least 8192")));
}

TEST(BudgetPlan, RanksThatOnlyDecodeOrOnlyPrefillHaveOneCap) {
  TokenBudget budget = engine_budget();
  budget.prefill_chunk.reset();
  auto numbers = numbers_of(make_budget_plan(budget, flash(8)));
  EXPECT_EQ(256, numbers.at("budget.cap"));
  EXPECT_FALSE(numbers.contains("budget.prefill"));
  EXPECT_FALSE(numbers.contains("decode_layouts.gather"));
  budget = engine_budget();
  budget.decode_graphs.clear();
  numbers = numbers_of(make_budget_plan(budget, flash(8)));
  EXPECT_EQ(8192, numbers.at("budget.cap"));
  EXPECT_FALSE(numbers.contains("budget.decode"));
  EXPECT_FALSE(numbers.contains("decode_layouts.gather"));
}

TEST(BudgetPlan, GroupsShareTheRanksEvenly) {
  for (const int ranks : {8, 16, 64}) EXPECT_NO_THROW(make_budget_plan(engine_budget(), flash(ranks))) << ranks;
  for (const int ranks : {1, 4, 12}) {
    EXPECT_THAT(
        [&] { make_budget_plan(engine_budget(), flash(ranks)); },
        ThrowsMessage<InputError>(HasSubstr("8 data-parallel groups cannot be of the same size on " + std::to_string(ranks))));
  }
}

}  // namespace
}  // namespace heddle
