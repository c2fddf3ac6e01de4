// Every way against what must arrive and what must come home, over random shapes and routings.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

void check(const Case& c, int rounds = 2) {
  SCOPED_TRACE(testing::Message() << describe(c.options) << "ranks=" << c.ranks() << " seed=" << c.seed);
  run_ranks(c.ranks(), {}, [&](Group& group) {
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    poison_heap(workspace, memory);
    const auto exchange = create_exchange(workspace, c.options, memory);
    for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
      TripOptions trip;
      trip.shared = round % 2 == 1 ? Shared::rows : Shared::none;
      round_trip(*exchange, c, group.rank(), round, trip);
    }
    workspace.close();
  });
}

TEST(Ways, RandomShapes) {
  std::mt19937_64 random(test_seed());
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  for (int i = 0; i < 120; ++i) {
    const Way way = all_ways[i % 5];
    const int ranks = pick(1, 2, 3, 5, 8);
    const int experts = pick(1, 3, 7, 8, 16, 40);
    const int cap = pick(1, 5, 16, 33);
    Case c;
    c.options = options_for(way, pick(64, 128, 192, 320), experts, ranks,
                            static_cast<int>(1 + random() % static_cast<std::uint64_t>(std::min(experts, 16))), cap);
    if (pick(0, 1) == 1) {
      std::vector<int> map;
      for (int e = 0; e < experts; ++e) map.push_back(static_cast<int>(random() % static_cast<std::uint64_t>(ranks)));
      c.options.placement = Placement::from_map(map, ranks);
    }
    c.options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.combine_wire = pick(Wire::bf16, Wire::bf16, Wire::fp8, Wire::nvfp4);
    c.options.quantisation = {pick(128, 32), pick(ScaleFormat::ue8m0, ScaleFormat::f32)};
    c.options.weight_at = pick(WeightAt::activation, WeightAt::combine);
    c.options.workers = pick(1, 1, 2, 3);
    if (way == Way::elastic) {
      c.options.reduce = pick(Reduce::rank, Reduce::home);
      c.options.cpu_sync = pick(0, 1) == 1;
    }
    if (way == Way::gather)
      c.options.gather = pick(GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled, GatherMode::tensor_parallel);
    const bool plain = c.options.wire == Wire::bf16 && c.options.combine_wire == Wire::bf16;
    if (way == Way::gather && c.options.gather == GatherMode::padded && plain) c.options.tagged_tokens = pick(0, 1, cap);
    if (way == Way::normal || way == Way::elastic)
      c.options.arrived = pick(ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed);
    c.options.queue_rows = pick(1, 4, 64);
    c.options.chunk_rows = std::min(c.options.queue_rows, pick(1, 3));
    c.none = pick(0.0, 0.1, 0.6);
    c.hot = pick(0, 0, 0, 1) == 1 ? static_cast<int>(random() % static_cast<std::uint64_t>(ranks)) : -1;
    for (int r = 0; r < ranks; ++r)
      c.tokens.push_back(pick(0, 1) == 1 ? cap : static_cast<int>(random() % static_cast<std::uint64_t>(cap + 1)));
    c.seed = random() % 100000;
    check(c, 3);
    if (testing::Test::HasFatalFailure() || testing::Test::HasFailure()) return;
  }
}

TEST(Ways, ManyRanks) {
  for (const int ranks : {64, 72}) {
    for (const Way way : all_ways) {
      Case c;
      c.options = options_for(way, 64, 72, ranks, 6, 3);
      c.options.queue_rows = 2;
      c.options.chunk_rows = 2;
      for (int r = 0; r < ranks; ++r) c.tokens.push_back(r % 4);
      c.seed = static_cast<std::uint64_t>(ranks);
      check(c);
    }
  }
}

TEST(Ways, CapBeyondRowNumbersIsRefused) {
  for (const Way way : {Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided}) {
    ExchangeOptions options = options_for(way, 64, 8, 4, 3, 100000000);
    EXPECT_NO_THROW(check_options(options)) << name(way);
    for (const int cap : {300000000, std::numeric_limits<int>::max()}) {
      options.cap = cap;
      EXPECT_THROW(check_options(options), InputError) << name(way);
    }
  }
}

TEST(Ways, EveryTokenToOneRankAndNobodyHasTokens) {
  for (const Way way : all_ways) {
    Case c;
    c.options = options_for(way, 128, 12, 4, 3, 9);
    c.tokens = {9, 9, 0, 9};
    c.hot = 2;
    check(c);
    c.tokens = {0, 0, 0, 0};
    check(c);
  }
}

}  // namespace
}  // namespace heddle
