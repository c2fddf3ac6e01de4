// The fused layer on the host engine against the slots chain (low_latency), bit for bit: random shapes, formats, batches and
// placements, 1 to 72 ranks, rings that wrap, repeated calls, poisoned heaps.
#include <gtest/gtest.h>

#include <cstring>

#include "exchange/host_exchange.hpp"
#include "layer_support.hpp"
#include "mega/options.hpp"

namespace heddle::layer_test {
namespace {

/// What mega does not do is left out; what it alone has is drawn.
Case for_mega(Case c, Chance& chance) {
  c.options.combine_wire = Wire::bf16;
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

}  // namespace
}  // namespace heddle::layer_test
