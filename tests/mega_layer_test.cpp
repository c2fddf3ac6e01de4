// The fused layer on the host engine against the slots chain (low_latency), bit for bit: random shapes, formats, batches and
// placements, 1 to 72 ranks, rings that wrap, repeated calls.
#include <gtest/gtest.h>

#include "layer/row_counts.hpp"
#include "layer_support.hpp"
#include "mega/options.hpp"

namespace heddle::layer_test {
namespace {

/// What mega does not do is left out; what it alone has is drawn.
Case for_mega(Case c, Chance& chance) {
  c.options.weight_at = WeightAt::activation;
  c.options.way = Way::mega;
  c.options.reduce = Reduce::rank;
  c.options.block_rows = chance.one_of({8, 8, 16, 128});
  c.options.ring = chance.one_of({RingSize::live, RingSize::full});
  if (c.layer.shared_intermediate == c.layer.shape.intermediate && chance.one_in(2)) c.options.shared = SharedMode::fused;
  return c;
}

Case with_way(Case c, Way way) {
  c.options.way = way;
  return c;
}

void expect_equal_to_the_chain(const Case& c, int calls = 1) {
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, c.seed);
  const Outcome fused = run_layer(source, c, tokens, calls);
  const Outcome chain = run_layer(source, with_way(c, Way::low_latency), tokens);
  EXPECT_EQ(different_bits(fused.outputs, chain.outputs), 0u) << text_of(c);
  for (std::size_t rank = 0; rank < fused.reports.size(); ++rank) {
    EXPECT_EQ(fused.reports[rank].rows_sent, chain.reports[rank].rows_sent) << rank;
    EXPECT_EQ(fused.reports[rank].rows_real, chain.reports[rank].rows_real) << rank;
    EXPECT_EQ(fused.reports[rank].combine.remote_bytes, chain.reports[rank].combine.remote_bytes) << rank;
    // Gate and up, 2 D bf16 values a row, are neither written nor read again.
    const std::uint64_t gate_up = chain.reports[rank].rows_real * 4 * static_cast<std::uint64_t>(c.layer.shape.intermediate);
    EXPECT_EQ(fused.reports[rank].gemm1.local_bytes + 2 * gate_up,
              chain.reports[rank].gemm1.local_bytes + chain.reports[rank].activation.local_bytes)
        << rank;
  }
}

class MegaOnRanks : public testing::TestWithParam<int> {};

TEST_P(MegaOnRanks, EqualsTheSlotsChainBitForBit) {
  const std::uint64_t seed = announced_seed();
  const int ranks = GetParam();
  for (int i = 0; i < rounds(ranks > 8 ? 8 : 30) && !HasFailure(); ++i) {
    Chance chance(seed + static_cast<std::uint64_t>(i));
    expect_equal_to_the_chain(for_mega(random_case(seed + static_cast<std::uint64_t>(i), ranks), chance), 2);
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, MegaOnRanks, testing::Values(1, 2, 3, 8, 16));

/// A layer of one size, to be varied.
Case one_layer(int ranks, int experts, int topk, int cap) {
  Case c;
  c.layer.shape = {192, 320, experts, topk, std::nullopt};  // 128, 128 and 64 activations a row
  c.layer.kind = WeightKind::mxfp4;
  c.layer.seed = 5;
  c.placement = Placement::contiguous(experts, ranks);
  c.options.way = Way::mega;
  c.options.cap = cap;
  c.options.block_rows = 8;
  c.tokens.assign(static_cast<std::size_t>(ranks), cap);
  return c;
}

TEST(MegaLayer, EqualsTheSlotsChainOn72Ranks) {
  Case c = one_layer(72, 80, 3, 4);
  c.seed = announced_seed();
  Chance chance(c.seed);
  c.tokens = random_split(chance, 72, 4);
  c.layer.shared_kind = WeightKind::fp8_block;
  c.layer.shared_intermediate = 128;
  expect_equal_to_the_chain(c);
}

TEST(MegaLayer, ColumnsOfSeveralTasks) {
  Case c = one_layer(2, 3, 2, 20);
  c.layer.shape.hidden = 576;  // 256, 256 and 64 columns
  for (const WeightKind kind : all_kinds) {
    for (const int group : {128, 32}) {
      c.layer.kind = kind;
      c.options.activation = Activation::fp8;
      c.options.quantisation = {group, group == 32 ? ScaleFormat::f32 : ScaleFormat::ue8m0};
      c.layer.shared_kind = kind;
      c.layer.shared_intermediate = 192;
      expect_equal_to_the_chain(c);
    }
  }
}

TEST(MegaLayer, EveryBatchUpToTheCap) {
  Case c = one_layer(2, 5, 3, 9);
  for (int mine = 0; mine <= 9; ++mine) {
    for (const int other : {0, 1, 8, 9}) {
      c.tokens = {mine, other};
      c.seed = static_cast<std::uint64_t>(10 * mine + other);
      expect_equal_to_the_chain(c);
    }
  }
}

TEST(MegaLayer, AllTokensToOneExpert) {
  for (const int ranks : {2, 5}) {
    Case c = one_layer(ranks, ranks, 1, 30);  // one expert a rank
    c.hot_rank = ranks - 1;
    c.missing = 0;
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Outcome outcome = run_layer(source, c, draw_tokens(c, 1));
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(outcome.reports[static_cast<std::size_t>(rank)].rows_real,
                rank == c.hot_rank ? 30u * static_cast<unsigned>(ranks) : 0u);
    }
    expect_equal_to_the_chain(c);
  }
}

TEST(MegaLayer, RanksWithoutExpertsOrTokens) {
  Case c = one_layer(5, 2, 2, 6);
  c.tokens = {0, 6, 3, 0, 1};
  expect_equal_to_the_chain(c);
  c.tokens = {0, 0, 0, 0, 0};
  expect_equal_to_the_chain(c);
  c.tokens = {2, 2, 2, 2, 2};
  c.missing = 1.0;  // nobody chooses anything
  expect_equal_to_the_chain(c);
  c.layer.shared_kind = WeightKind::bf16;
  c.layer.shared_intermediate = 64;
  c.gated_shared = true;
  expect_equal_to_the_chain(c);
}

// The smallest ring goes round many times, the full one never: equal bits, and the same as the chain's.
TEST(MegaLayer, ARingThatWrapsManyTimesGivesTheBitsOfAFullOne) {
  Case c = one_layer(2, 2, 2, 200);
  c.missing = 0;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  for (const int workers : {1, 3}) {
    c.options.workers = workers;
    const Tokens tokens = draw_tokens(c, 7);
    const Outcome live = run_layer(source, c, tokens, 2);
    LayerWeights weights = LayerWeights::load(source, c.placement, 0);
    const auto ring = [&](RingSize size) {
      LayerOptions options = c.options;
      options.ring = size;
      return make_mega_layout(exchange_options(weights, options), workers, {}).ring_blocks;
    };
    const auto blocks = static_cast<int>(live.reports[0].rows_room) / 8;
    EXPECT_GE(blocks, 7 * ring(RingSize::live)) << "the ring is meant to wrap";
    EXPECT_LE(blocks, ring(RingSize::full));
    c.options.ring = RingSize::full;
    EXPECT_EQ(different_bits(live.outputs, run_layer(source, c, tokens).outputs), 0u);
    c.options.ring = RingSize::live;
    EXPECT_EQ(different_bits(live.outputs, run_layer(source, with_way(c, Way::low_latency), tokens).outputs), 0u);
    c.options.block_rows = 256;
    EXPECT_EQ(different_bits(live.outputs, run_layer(source, c, tokens).outputs), 0u) << "row blocks change a bit";
    c.options.block_rows = 8;
  }
}

TEST(MegaLayer, TensorParallelAttentionGivesAllOutputsToAll) {
  Case c = one_layer(3, 6, 2, 4);
  c.tokens = {4, 3, 4};
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, 3);
  const std::vector<bf16> apart = run_layer(source, c, tokens).outputs;
  make_tensor_parallel(c);
  EXPECT_EQ(different_bits(run_layer(source, c, tokens, 2).outputs, apart), 0u);
}

TEST(MegaLayer, AFusedSharedExpertHasTheBitsOfOneAlone) {
  Case c = one_layer(2, 4, 2, 12);
  c.layer.shared_kind = WeightKind::mxfp8;
  c.layer.shared_intermediate = c.layer.shape.intermediate;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, 3);
  const std::vector<bf16> alone = run_layer(source, c, tokens).outputs;
  c.options.shared = SharedMode::fused;
  EXPECT_EQ(different_bits(run_layer(source, c, tokens).outputs, alone), 0u);
  EXPECT_EQ(different_bits(run_layer(source, with_way(c, Way::low_latency), tokens).outputs, alone), 0u);
}

// As one more routed expert it is computed from rows as they travel, and added last as ever.
TEST(MegaLayer, AnExtraExpertHasTheBitsOfASharedExpertInside) {
  const std::uint64_t seed = announced_seed();
  for (const WeightKind kind : all_kinds) {
    for (const int ranks : {1, 2, 5}) {
      Case c = one_layer(ranks, ranks + 1, 2, 20);
      c.layer.kind = kind;
      c.layer.shared_kind = kind;
      c.layer.shared_intermediate = c.layer.shape.intermediate;
      c.seed = seed;
      Chance chance(seed);
      c.tokens = random_split(chance, ranks, 20);
      SyntheticLayer layer(c.layer);
      const LayerSource source = source_of(layer, c);
      const Tokens tokens = draw_tokens(c, c.seed);
      const std::vector<bf16> inside = run_layer(source, c, tokens).outputs;
      c.options.shared = SharedMode::extra;
      for (const RingSize ring : {RingSize::live, RingSize::full}) {
        c.options.ring = ring;
        EXPECT_EQ(different_bits(run_layer(source, c, tokens, 2).outputs, inside), 0u) << text_of(c);
      }
      make_tensor_parallel(c);
      EXPECT_EQ(different_bits(run_layer(source, c, tokens).outputs, inside), 0u) << text_of(c);
    }
  }
}

std::string refusal_of(const Case& c) {
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  try {
    exchange_options(LayerWeights::load(source, c.placement, 0), c.options);
  } catch (const InputError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(MegaLayer, AnExtraExpertIsLikeTheOthersOrRefusedByName) {
  Case c = one_layer(2, 4, 2, 4);
  c.options.shared = SharedMode::extra;
  EXPECT_EQ(refusal_of(c), "nothing was refused") << "there is no shared expert";
  c.layer.shared_kind = c.layer.kind;
  c.layer.shared_intermediate = c.layer.shape.intermediate;
  EXPECT_EQ(refusal_of(c), "nothing was refused");
  const auto expect_refused = [](const Case& other, const char* why) {
    EXPECT_NE(refusal_of(other).find(why), std::string::npos) << refusal_of(other);
  };
  Case other = c;
  other.options.way = Way::low_latency;
  expect_refused(other, "take shared = fused");
  other = c;
  other.gated_shared = true;
  expect_refused(other, "has a gate");
  other = c;
  other.layer.shared_kind = WeightKind::fp8_block;
  expect_refused(other, "another kind");
  other = c;
  other.layer.shared_intermediate = 64;
  expect_refused(other, "its intermediate size is 64, that of the routed experts 320");
}

/// Rows and bytes as they follow from ids alone, against what the layer counted.
void expect_counts_of_the_layer(const Case& c) {
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, c.seed);
  const Outcome outcome = run_layer(source, c, tokens);
  RowCounts counts(exchange_options(LayerWeights::load(source, c.placement, 0), c.options));
  for (int rank = 0; rank < c.ranks(); ++rank) {
    const int first = c.options.tensor_parallel ? slice_begin(c.all_tokens(), rank, c.ranks()) : c.first(rank);
    const int end = c.options.tensor_parallel ? slice_begin(c.all_tokens(), rank + 1, c.ranks())
                                              : first + c.tokens[static_cast<std::size_t>(rank)];
    counts.count(rank, {end - first, nullptr, tokens.routing.ids.data() + first * c.layer.shape.topk, nullptr, {}});
  }
  const std::vector<bool> live(outcome.reports.size(), true);
  for (int rank = 0; rank < c.ranks(); ++rank) {
    SCOPED_TRACE(testing::Message() << "rank " << rank << ": " << text_of(c));
    const LayerReport& report = outcome.reports[static_cast<std::size_t>(rank)];
    const ExchangeTraffic out = counts.dispatched(rank, live);
    const ExchangeTraffic back = counts.combined(rank, live, c.options.tensor_parallel && c.all_tokens() > 0);
    EXPECT_EQ(counts.sent(rank, live), report.rows_sent);
    EXPECT_EQ(static_cast<std::uint64_t>(counts.received(rank, live)), report.rows_received);
    EXPECT_EQ(out.remote_bytes, report.dispatch.remote_bytes);
    EXPECT_EQ(out.local_bytes, report.dispatch.local_bytes);
    EXPECT_EQ(back.remote_bytes, report.combine.remote_bytes);
    EXPECT_EQ(back.local_bytes, report.combine.local_bytes);
  }
}

TEST(MegaLayer, RowsAndBytesFollowFromTheIds) {
  const std::uint64_t seed = announced_seed();
  for (int i = 0; i < rounds(24) && !HasFailure(); ++i) {
    Chance chance(seed + static_cast<std::uint64_t>(i));
    Case c = for_mega(random_case(seed + static_cast<std::uint64_t>(i), chance.between(1, 5)), chance);
    if (chance.one_in(3)) make_tensor_parallel(c);
    if (chance.one_in(3)) {
      c.layer.shared_kind = c.layer.kind;
      c.layer.shared_intermediate = c.layer.shape.intermediate;
      c.gated_shared = false;
      c.options.shared = SharedMode::extra;
      c.options.combine_wire = Wire::bf16;
    }
    expect_counts_of_the_layer(c);
  }
}

TEST(MegaLayer, MeetsTheReference) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  for (int i = 0; i < rounds(16); ++i) {
    Chance chance(seed + static_cast<std::uint64_t>(i));
    const Case c = for_mega(random_case(seed + static_cast<std::uint64_t>(i), chance.between(1, 4)), chance);
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    bounds.expect(c, run_layer(source, c, tokens).outputs, reference_of(source, c, tokens));
  }
}

}  // namespace
}  // namespace heddle::layer_test
