// The planner against brute force, its limits, and what it refuses.
#include "heddle/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "heddle/error.hpp"
#include "plan/text.hpp"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::array<Way, 6> all_ways{Way::gather, Way::normal, Way::low_latency, Way::elastic, Way::one_sided, Way::mega};

PlanRequest small_request() {
  PlanRequest request;
  request.shape = {512, 256, 64, 6, {}};
  request.weights = WeightKind::mxfp4;
  request.ranks = 8;
  request.tokens = 16;
  request.cap = 32;
  request.wire = Wire::fp8;
  request.machine = find_machine("h200");
  return request;
}

/// Every set of k of at most 16 experts, counted: ranks of a set, on average.
double copies_by_enumeration(int experts, int topk, int ranks) {
  std::uint64_t sets = 0, copies = 0;
  for (std::uint32_t chosen = 0; chosen < (1u << experts); ++chosen) {
    if (std::popcount(chosen) != topk) {
      continue;
    }
    std::set<int> needed;
    for (int expert = 0; expert < experts; ++expert) {
      if ((chosen >> expert & 1u) != 0) {
        needed.insert(expert * ranks / experts);
      }
    }
    ++sets;
    copies += needed.size();
  }
  return static_cast<double>(copies) / static_cast<double>(sets);
}

TEST(Copies, MatchEveryChoiceThatARouterCanMake) {
  for (const int experts : {1, 5, 12}) {
    for (const int ranks : {1, 2, 3, 4, 7, 16}) {
      for (int topk = 1; topk <= experts; ++topk) {
        EXPECT_NEAR(copies_by_enumeration(experts, topk, ranks), expected_copies(experts, topk, ranks), 1e-12)
            << experts << " experts, top-" << topk << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(Copies, WithReplacementMatchDraws) {
  const std::uint32_t seed = std::random_device{}();
  std::mt19937 random(seed);
  const int experts = 20, topk = 5, ranks = 6, tokens = 200000;  // 20 experts on 6 ranks: uneven
  std::uniform_int_distribution<int> expert(0, experts - 1);
  double copies = 0;
  for (int token = 0; token < tokens; ++token) {
    std::set<int> needed;
    for (int choice = 0; choice < topk; ++choice) {
      needed.insert(expert(random) * ranks / experts);
    }
    copies += static_cast<double>(needed.size());
  }
  // The count of one token is at most 5 and deviates by less than 1: 6 standard errors are 0.014.
  EXPECT_NEAR(copies / tokens, expected_copies_with_replacement(experts, topk, ranks), 0.014) << "seed " << seed;
  EXPECT_LT(expected_copies_with_replacement(experts, topk, ranks), expected_copies(experts, topk, ranks));
}

TEST(Copies, ExpertsOfARankMatchThePlacement) {
  for (const int experts : {1, 3, 64, 160, 257}) {
    for (const int ranks : {1, 2, 3, 7, 64, 72}) {
      std::vector<int> held(static_cast<std::size_t>(ranks));
      for (int expert = 0; expert < experts; ++expert) {
        ++held[static_cast<std::size_t>(expert * ranks / experts)];
      }
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(held[static_cast<std::size_t>(rank)], experts_on_rank(experts, ranks, rank))
            << experts << ' ' << ranks << ' ' << rank;
      }
      EXPECT_EQ(*std::max_element(held.begin(), held.end()), most_local_experts(experts, ranks)) << experts << ' ' << ranks;
    }
  }
}

TEST(Copies, TouchedExpertsMatchDraws) {
  const std::uint32_t seed = std::random_device{}();
  std::mt19937 random(seed);
  const int experts = 24, topk = 3, local = 8, tokens = 7, trials = 40000;
  double touched = 0;
  for (int trial = 0; trial < trials; ++trial) {
    std::set<int> seen;
    for (int token = 0; token < tokens; ++token) {
      std::vector<int> all(experts);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      for (int choice = 0; choice < topk; ++choice) {
        if (all[static_cast<std::size_t>(choice)] < local) {
          seen.insert(all[static_cast<std::size_t>(choice)]);
        }
      }
    }
    touched += static_cast<double>(seen.size());
  }
  // At most 8, deviating by less than 1.5: 6 standard errors are 0.045.
  EXPECT_NEAR(touched / trials, expected_touched_experts(local, experts, topk, tokens), 0.045) << "seed " << seed;
}

TEST(Bytes, WeightsOfEveryKind) {
  const LayerShape shape{256, 192, 4, 2, {}};  // gate and up [192, 256], down [256, 192]
  const std::uint64_t values = 3 * 256 * 192;
  const auto bytes = [&](WeightKind kind) { return expert_weight_bytes(shape, kind); };
  EXPECT_EQ(2 * values, bytes(WeightKind::bf16).total());
  EXPECT_EQ(values / 2 + values / 32, bytes(WeightKind::mxfp4).total());
  EXPECT_EQ(values / 2 + values / 16, bytes(WeightKind::nvfp4).total());
  EXPECT_EQ(values + values / 32, bytes(WeightKind::mxfp8).total());
  EXPECT_EQ(values, bytes(WeightKind::fp8_block).values);
  EXPECT_EQ(4u * (3 * 2 * 2), bytes(WeightKind::fp8_block).scales);  // 192 rows or columns make 2 blocks, as 256 do
}

TEST(Bytes, NothingIsRemoteOnOneRank) {
  PlanRequest request = small_request();
  request.ranks = 1;
  for (const Way way : all_ways) {
    EXPECT_GT(dispatch_traffic(way, request).bytes, 0);
    EXPECT_EQ(0, dispatch_traffic(way, request).remote_bytes);
  }
}

TEST(Buffers, GrowWithTheCapAndRepeatTheirRegions) {
  PlanRequest request = small_request();
  for (const Way way : all_ways) {
    std::uint64_t before = 0;
    for (const int cap : {16, 1920, 5760, 5761, 20000}) {
      request.cap = cap;
      const Buffer buffer = article_buffer(way, request);
      EXPECT_GE(buffer.bytes(), before) << "cap " << cap;
      before = buffer.bytes();
      std::set<std::string> names;
      for (const Region& region : buffer.regions) {
        EXPECT_TRUE(names.insert(region.name).second) << region.name;
      }
    }
  }
  EXPECT_THAT([&] { article_buffer(Way::gather, request).region("nothing"); }, ThrowsMessage<InputError>(HasSubstr("nothing")));
}

TEST(Buffers, ARingIsNeverLargerThanTheWorstCase) {
  for (const ModelPreset& preset : model_presets()) {
    for (const int ranks : {1, 2, 8, 64}) {
      const auto bytes = [&](ArrivedRegion arrived) { return fused_buffer(preset.shape, ranks, 1024, arrived, 0, 132).bytes(); };
      EXPECT_LE(bytes(ArrivedRegion::ring), bytes(ArrivedRegion::worst_case)) << preset.name << ", " << ranks << " ranks";
    }
  }
}

TEST(Buffers, ATokenNeedsNoMoreRowsThanARankHasExperts) {
  const LayerShape shape{512, 256, 8, 6, {}};
  EXPECT_EQ(4u * 1920 * 2, fused_worst_rows(shape, 4, 1));  // 2 experts a rank
  EXPECT_EQ(1u * 1920 * 6, fused_worst_rows(shape, 1, 1));  // all 8: the token's 6
}

TEST(Grids, PersistentIsNeverLargerThanPadded) {
  for (const ModelPreset& preset : model_presets()) {
    for (const int cap : {1, 64, 4096}) {
      const GridPlan grid = activation_grid(preset.shape, 2, cap, 132);
      EXPECT_LE(grid.persistent, grid.padded);
      EXPECT_LE(grid.persistent, grid.slots);
      EXPECT_TRUE(grid.persistent == grid.padded || grid.persistent == grid.slots);
      EXPECT_GE(grid.ctas_an_sm, 1);
      EXPECT_LE(grid.threads * grid.ctas_an_sm, 2048);
      EXPECT_LE(grid.threads, 1024);
    }
  }
}

TEST(Time, TransferSmsFollowTheLink) {
  // 4 ranks, 75 GB/s link: 100 GB/s arrive; an SM writes 20: 5 SMs, 6.25 with the margin, 7, even: 8.
  EXPECT_EQ(8, transfer_sms(3.0, 4, 75e9, 1000e9, 20e9, 132));
  // Reading binds: 100 / (2 copies * 5 GB/s) = 10 SMs, 12.5, 13, even: 14.
  EXPECT_EQ(14, transfer_sms(2.0, 4, 75e9, 5e9, 20e9, 132));
  EXPECT_EQ(4, transfer_sms(3.0, 4, 1e9, 1000e9, 1000e9, 132));   // the least
  EXPECT_EQ(132, transfer_sms(3.0, 4, 9000e9, 10e9, 10e9, 132));  // no more than there are
  EXPECT_EQ(132, transfer_sms(1.0, 1, 75e9, 10e9, 10e9, 132));    // no link to wait for
}

TEST(Time, FloorsAreBytesOverRates) {
  PlanRequest request = small_request();
  request.tokens = 4096;
  request.cap = 4096;
  const Floors floors = expert_floors(request);
  const double rows = 4096.0 * 6;  // tokens x ranks x k / ranks
  EXPECT_NEAR(6 * rows * 512 * 256 / 1400e12, floors.operations, 1e-12);
  EXPECT_NEAR(8 * (3 * 512 * 256 / 2 + 3 * 512 * 256 / 32) / 4.5e12, floors.weights, 1e-12);  // all 8 local experts touched
  EXPECT_NEAR(rows * (2 * 256 * 2 + 256 + 2) / 3.9e12, floors.activation, 1e-12);
  request.machine = find_machine("b200");
  EXPECT_EQ(0, expert_floors(request).weights);
}

TEST(Time, AnEstimateNeedsEveryRateAndCoversItsFloors) {
  PlanRequest request = small_request();
  for (const Way way : all_ways) {
    const auto estimate = estimate_time(way, request);
    ASSERT_TRUE(estimate.has_value());
    const double wire = (dispatch_traffic(way, request).remote_bytes + combine_traffic(way, request).remote_bytes) / 370e9;
    EXPECT_GT(estimate->exchange, wire);
    EXPECT_GE(estimate->total, std::max(estimate->exchange, estimate->experts));
  }
  request.machine.link.reset();
  EXPECT_FALSE(estimate_time(Way::gather, request).has_value());
}

TEST(Presets, HaveUniqueNamesAndPlan) {
  std::set<std::string_view> names;
  for (const ModelPreset& preset : model_presets()) {
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_EQ(&preset, &find_preset(preset.name));
    PlanRequest request = small_request();
    request.shape = preset.shape;
    for (const Machine& machine : machines()) {
      request.machine = machine;
      EXPECT_NO_THROW(make_plan(request)) << preset.name << " on " << machine.name;
    }
  }
  EXPECT_EQ(14u, names.size());
}

TEST(Presets, LeaveOutWhatIsNotConfirmed) {
  EXPECT_FALSE(find_preset("deepseek-v4-pro").shared_experts.has_value());
  EXPECT_TRUE(find_preset("deepseek-v4-pro").weights.empty());
  EXPECT_FALSE(find_preset("deepseek-v4-pro").router->scale.has_value());
  EXPECT_FALSE(find_preset("qwen3.8-flash-next").router.has_value());
  EXPECT_FALSE(find_preset("qwen3.8-flash-next").shared_experts.has_value());
  for (const ModelPreset& preset : model_presets()) {
    EXPECT_EQ(preset.name == "kimi-k3" || preset.name == "gpt-oss-120b", preset.plan_only) << preset.name;
  }
}

TEST(Presets, AnUnknownNameIsToldTheKnownOnes) {
  EXPECT_THAT([] { find_preset("deepseek-v5"); }, ThrowsMessage<InputError>(HasSubstr("deepseek-v4-flash")));
  EXPECT_THAT([] { find_machine("h100"); }, ThrowsMessage<InputError>(HasSubstr("h200")));
}

TEST(Plan, NamesAreUniqueAndEveryNumberHasASource) {
  const Plan plan = make_plan(small_request());
  std::set<std::string> names;
  for (const Section& section : plan.sections) {
    EXPECT_FALSE(section.quantities.empty()) << section.name;
    for (const Quantity& quantity : section.quantities) {
      EXPECT_TRUE(names.insert(section.name + "." + quantity.name).second) << section.name << '.' << quantity.name;
      EXPECT_TRUE(std::isfinite(quantity.value)) << quantity.name;
      EXPECT_FALSE(quantity.formula.empty()) << quantity.name;
      EXPECT_FALSE(quantity.source.empty()) << quantity.name;
    }
  }
  for (const char* name :
       {"copies.needed_ranks", "traffic.elastic.dispatch", "article_buffers.mega.total", "mega_buffer.live.total",
        "activation.persistent", "gemm.gemm1_tasks", "floors.weights", "model.elastic.sms"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

// What the plan says of the fused layer is what its workspace then takes.
TEST(Plan, TheFusedLayersBufferIsWhatItsLayoutSays) {
  PlanRequest request = small_request();
  const std::tuple<int, Wire, Combine> variants[] = {{0, Wire::bf16, Combine::slots}, {2, Wire::bf16, Combine::slots},
                                                     {2, Wire::fp8, Combine::slots},  {0, Wire::nvfp4, Combine::slots},
                                                     {0, Wire::bf16, Combine::add},   {1, Wire::bf16, Combine::add}};
  for (const auto& [shared, combine_wire, combine] : variants) {
    request.shared_experts = shared;
    request.combine_wire = combine_wire;
    request.combine = combine;
    request.machine.sms = 32;
    ExchangeOptions options;
    options.way = Way::mega;
    options.hidden = request.shape.hidden;
    options.topk = request.shape.topk;
    options.cap = request.cap;
    options.placement = Placement::contiguous(request.shape.experts, request.ranks);
    options.wire = request.wire;
    options.combine_wire = combine_wire;
    options.combine = combine;
    options.quantisation = request.quantisation;
    options.arrived = default_layout(Way::mega);
    options.workers = 32;
    options.mega.intermediate = request.shape.intermediate;
    options.mega.shared_intermediate = shared * request.shape.intermediate;
    for (const RingSize ring : {RingSize::live, RingSize::full}) {
      options.mega.ring = ring;
      const ExchangeMemory memory = exchange_memory(options);
      EXPECT_EQ(memory.dispatch + memory.combine + memory.mega_words + memory.mega_sums, mega_buffer(request, ring).bytes());
      if (ring == RingSize::full) continue;
      EXPECT_EQ(memory.heap_bytes(request.ranks), own_layouts().at(Way::mega)(request));
    }
  }
}

TEST(Plan, AWaysOwnLayoutReportsItsBytes) {
  const auto has_own = [](const Plan& plan) {
    return std::any_of(plan.sections.begin(), plan.sections.end(),
                       [](const Section& section) { return section.name == "own_layouts"; });
  };
  const PlanRequest request = small_request();
  EXPECT_FALSE(has_own(make_plan(request, {})));
  const Plan plan = make_plan(request, {{Way::gather, [](const PlanRequest& asked) { return std::uint64_t(asked.cap) * 1000; }}});
  ASSERT_TRUE(has_own(plan));
  const auto own =
      std::find_if(plan.sections.begin(), plan.sections.end(), [](const Section& one) { return one.name == "own_layouts"; });
  ASSERT_EQ(1u, own->quantities.size());
  EXPECT_EQ("gather", own->quantities[0].name);
  EXPECT_EQ(32000, own->quantities[0].value);
}

TEST(Plan, RefusesWhatMakesNoLayer) {
  const auto refused = [](auto change, const char* part) {
    PlanRequest request = small_request();
    change(request);
    EXPECT_THAT([&] { make_plan(request); }, ThrowsMessage<InputError>(HasSubstr(part))) << part;
  };
  refused([](PlanRequest& r) { r.shape.hidden = 100; }, "128");
  refused([](PlanRequest& r) { r.shape.intermediate = 0; }, "intermediate size is 0");
  refused([](PlanRequest& r) { r.shape.topk = 65; }, "top-k is 65");
  refused([](PlanRequest& r) { r.shape.experts = 4; }, "between 1 and 4");  // top-6
  refused([](PlanRequest& r) { r.ranks = 0; }, "number of ranks is 0");
  refused([](PlanRequest& r) { r.tokens = 33; }, "33 tokens but the cap is 32");
  refused([](PlanRequest& r) { r.tokens = 0; }, "0 tokens");
  refused([](PlanRequest& r) { r.quantisation.group = 64; }, "32 or 128");
}

TEST(Plan, TheLargestRequestDoesNotOverflow) {
  PlanRequest request = small_request();
  request.shape = {65536, 65536, 16384, 64, {}};
  request.ranks = 1024;
  request.cap = request.tokens = 1 << 20;
  ASSERT_NO_THROW(check_request(request));
  // In long double the same products cannot wrap.
  const long double group_rows = 1024.0L * (1 << 20), row = 65536 + 65536 / 128;
  EXPECT_EQ(16 * group_rows * row, static_cast<long double>(article_buffer(Way::low_latency, request).region("arrived").bytes));
  EXPECT_EQ(16 * group_rows * row, static_cast<long double>(article_buffer(Way::elastic, request).region("by_expert").bytes));
  const long double fused_rows = 1024.0L * fused_cap(1 << 20) * 16;
  EXPECT_EQ(fused_rows, static_cast<long double>(fused_worst_rows(request.shape, 1024, 1 << 20)));
  const Buffer fused = fused_buffer(request.shape, 1024, 1 << 20, ArrivedRegion::worst_case, 16, 132);
  EXPECT_GT(static_cast<long double>(fused.bytes()), fused_rows * (65536 + 65536 + 16 * 2 * 65536 / 32));
  EXPECT_EQ(64 * group_rows, static_cast<long double>(activation_grid(request.shape, 1024, 1 << 20, 132).padded));
}

TEST(Text, CommasBetweenThousands) {
  EXPECT_EQ("0", plan::with_commas("0"));
  EXPECT_EQ("999", plan::with_commas("999"));
  EXPECT_EQ("1,000", plan::with_commas("1000"));
  EXPECT_EQ("1,234,567.89", plan::with_commas("1234567.89"));
}

}  // namespace
}  // namespace heddle
