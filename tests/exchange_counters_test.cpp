// Counters that a kernel writes and the host copies at any moment: a copy is whole or is known not to be. Here a thread
// plays the kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "exchange/counters.hpp"
#include "exchange_support.hpp"

namespace heddle {
namespace {

using Count = ExchangeCounters::Count;

void store(Word& to, Word value) { std::atomic_ref<Word>(to).store(value, std::memory_order_relaxed); }
Word load(Word& from) { return std::atomic_ref<Word>(from).load(std::memory_order_relaxed); }

std::vector<Word*> words_of(std::vector<Tally>& tallies) {
  std::vector<Word*> words;
  for (Tally& tally : tallies) words.insert(words.end(), {&tally.last[0], &tally.last[1], &tally.sum[0], &tally.sum[1]});
  return words;
}

/// What counter i grows by in a call: more than half a word now and then, so that sums carry.
std::uint64_t added(std::uint32_t call, std::size_t i) { return call * 0x9E3779B97F4A7C15ull >> (20 + i % 30); }

std::vector<Tally> after_call(const std::vector<Tally>& before, std::uint32_t call) {
  std::vector<Tally> now;
  for (std::size_t i = 0; i < before.size(); ++i) now.push_back(before[i].after(added(call, i)));
  return now;
}

TEST(ExchangeCounters, SumsCarryAndCallsAreNumbered) {
  Tally tally;
  EXPECT_EQ(tally.call(), 0u);
  tally = tally.after(0xFFFFFFFFull);
  tally = tally.after(2);
  EXPECT_EQ(tally.call(), 2u);
  EXPECT_EQ(Tally::value(tally.last), 2u);
  EXPECT_EQ(Tally::value(tally.sum), 0x100000001ull);
  tally = tally.after(0x7000000000ull);
  EXPECT_EQ(Tally::value(tally.last), 0x7000000000ull);
  EXPECT_EQ(Tally::value(tally.sum), 0x7100000001ull);
}

// The stores of one call in any order: after each but the last the set is known to be torn.
TEST(ExchangeCounters, EveryPartOfACallIsTorn) {
  std::mt19937_64 random(test_seed());
  std::vector<Tally> set(5);
  for (std::uint32_t call = 1; call <= 50; ++call) {
    ASSERT_TRUE(is_whole(set)) << "before call " << call;
    std::vector<Tally> now = after_call(set, call);
    const std::vector<Word*> to = words_of(set), from = words_of(now);
    std::vector<std::size_t> order(to.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (i > 0) {
        ASSERT_FALSE(is_whole(set)) << "after " << i << " stores of call " << call;
      }
      *to[order[i]] = *from[order[i]];
    }
  }
  EXPECT_TRUE(is_whole(set));
}

TEST(ExchangeCounters, WholeCopiesAreOfOneCall) {
  constexpr std::uint32_t calls = 20000;
  std::vector<Tally> set(9);
  std::thread kernel([&] {
    std::vector<Tally> now = set;
    const std::vector<Word*> to = words_of(set);
    for (std::uint32_t call = 1; call <= calls; ++call) {
      now = after_call(now, call);
      const std::vector<Word*> from = words_of(now);
      // Begins at another word each time: no order is promised.
      for (std::size_t i = 0; i < to.size(); ++i) store(*to[(i + call) % to.size()], *from[(i + call) % to.size()]);
    }
  });
  std::vector<std::uint64_t> sums(set.size(), 0);
  std::vector<Tally> copy(set.size());
  const std::vector<Word*> from = words_of(set), to = words_of(copy);
  std::uint32_t seen = 0;
  while (seen < calls) {
    for (std::size_t i = 0; i < from.size(); ++i) *to[i] = load(*from[i]);
    if (!is_whole(copy)) continue;
    ASSERT_GE(copy[0].call(), seen) << "calls go backwards";
    for (; seen < copy[0].call(); ++seen) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += added(seen + 1, i);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      EXPECT_EQ(Tally::value(copy[i].sum), sums[i]) << "counter " << i << ", call " << seen;
      EXPECT_EQ(Tally::value(copy[i].last), seen == 0 ? 0 : added(seen, i)) << "counter " << i << ", call " << seen;
    }
    if (HasFailure()) break;
  }
  kernel.join();
}

TEST(ExchangeCounters, RowsSentToExpertsAreSummedByRank) {
  TallyPlan plan;
  plan.ranks = 3;
  plan.sent = 3;  // as many experts as ranks, and still not by rank
  plan.sent_to_experts = true;
  plan.experts = 2;
  const Placement placement = Placement::from_map({2, 0, 2}, 3);
  // Two calls: calls, nanoseconds, to experts, from ranks, of local experts; then calls and nanoseconds of combine.
  const std::uint64_t first[] = {1, 70, 5, 6, 7, 1, 2, 3, 11, 12, 1, 80};
  const std::uint64_t second[] = {1, 71, 50, 60, 70, 10, 20, 30, 110, 120, 1, 81};
  ASSERT_EQ(plan.size(), 12);
  std::vector<Tally> all(12);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = all[i].after(first[i]).after(second[i]);
  const ExchangeCounters counters = counters_of(all, plan, placement, 1);
  const auto expect = [](const Count& have, std::uint64_t last, std::uint64_t sum, const char* what) {
    EXPECT_EQ(have.last, last) << what;
    EXPECT_EQ(have.sum, sum) << what;
  };
  EXPECT_EQ(counters.dispatches, 2u);
  EXPECT_EQ(counters.combines, 2u);
  expect(counters.dispatch_wait, 71, 141, "dispatch");
  expect(counters.combine_wait, 81, 161, "combine");
  ASSERT_EQ(counters.sent.size(), 3u);
  expect(counters.sent[0], 60, 66, "to rank 0: expert 1");
  expect(counters.sent[1], 0, 0, "to rank 1, which has none");
  expect(counters.sent[2], 120, 132, "to rank 2: experts 0 and 2");
  ASSERT_EQ(counters.arrived.size(), 3u);
  expect(counters.arrived[1], 20, 22, "from rank 1");
  ASSERT_EQ(counters.experts.size(), 1u) << "the plan has room for two, this rank has one";
  expect(counters.experts[0], 110, 121, "local expert 0");
}

// Where rows arrive as routed the combine behind a dispatch tells rows by expert: they are of the last combine.
TEST(ExchangeCounters, RowsByExpertMayComeWithCombine) {
  TallyPlan plan;
  plan.ranks = plan.sent = 2;
  plan.experts = 2;
  plan.experts_by_combine = true;
  const Placement placement = Placement::contiguous(4, 2);
  // Two dispatches, and the combine of the first: calls, nanoseconds, to ranks, from ranks; calls, nanoseconds, of local experts.
  const std::uint64_t first[] = {1, 70, 3, 4, 5, 6, 1, 80, 7, 8};
  const std::uint64_t second[] = {1, 71, 30, 40, 50, 60};
  ASSERT_EQ(plan.size(), 10);
  ASSERT_EQ(plan.dispatch_size(), 6);
  std::vector<Tally> all(10);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = all[i].after(first[i]);
    if (i < std::size(second)) all[i] = all[i].after(second[i]);
  }
  const ExchangeCounters counters = counters_of(all, plan, placement, 2);
  EXPECT_EQ(counters.dispatches, 2u);
  EXPECT_EQ(counters.combines, 1u);
  EXPECT_EQ(counters.sent[1].last, 40u);
  EXPECT_EQ(counters.arrived[1].sum, 66u);
  EXPECT_EQ(counters.combine_wait.last, 80u);
  ASSERT_EQ(counters.experts.size(), 2u);
  EXPECT_EQ(counters.experts[0].last, 7u);
  EXPECT_EQ(counters.experts[1].sum, 8u);
}

TEST(ExchangeCounters, ImbalanceIsTheLargestOverTheMean) {
  const auto of = [](std::vector<Count> rows) { return imbalance(rows); };
  EXPECT_EQ(of({}).last, 0.0);
  EXPECT_EQ(of({{0, 0}, {0, 0}}).sum, 0.0);
  EXPECT_EQ(of({{4, 8}, {4, 8}, {4, 8}}).last, 1.0);
  EXPECT_EQ(of({{0, 30}, {0, 10}, {9, 20}}).last, 3.0);
  EXPECT_EQ(of({{0, 30}, {0, 10}, {9, 20}}).sum, 1.5);
}

}  // namespace
}  // namespace heddle
