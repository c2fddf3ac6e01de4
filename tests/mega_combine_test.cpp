// What becomes of results that come home: slots in the wire's format have the bits of the slots chain with that wire; results that
// are added where they arrive have its sums, rounded at every addition.
#include <gtest/gtest.h>

#include <algorithm>

#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

Case mega_case(std::uint64_t seed, int ranks) {
  Chance chance(seed + 1);
  Case c = random_case(seed, ranks);
  c.options.way = Way::mega;
  c.options.weight_at = WeightAt::activation;
  c.options.block_rows = chance.one_of({8, 16, 128});
  c.options.ring = chance.one_of({RingSize::live, RingSize::full});
  return c;
}

std::vector<bf16> outputs_of_the_chain(const LayerSource& source, Case c, const Tokens& tokens) {
  c.options.way = Way::low_latency;
  c.options.combine = Combine::slots;
  return run_layer(source, c, tokens).outputs;
}

// Columns in several tasks, groups that end with them, a short last group (576 = 4 groups of 128 and one of 64).
TEST(MegaCombine, SlotsOfEveryWireHaveTheBitsOfTheChain) {
  const std::uint64_t seed = announced_seed();
  for (const WeightKind kind : all_kinds) {
    for (const Wire wire : {Wire::fp8, Wire::nvfp4}) {
      for (const int ranks : {1, 2, 8}) {
        for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
          Case c = mega_case(seed, ranks);
          c.layer.kind = kind;
          c.layer.shape.hidden = 576;
          c.options.combine_wire = wire;
          c.options.quantisation.scale = scale;
          SyntheticLayer layer(c.layer);
          const LayerSource source = source_of(layer, c);
          const Tokens tokens = draw_tokens(c, c.seed);
          const std::vector<bf16> fused = run_layer(source, c, tokens, 2).outputs;
          ASSERT_EQ(different_bits(fused, outputs_of_the_chain(source, c, tokens)), 0u) << text_of(c);
        }
      }
    }
  }
}

Case with_added_results(Case c) {
  c.options.combine_wire = Wire::bf16;
  c.options.combine = Combine::add;
  return c;
}

// One sum of two rounded once is the same in any order, and so are calls.
TEST(MegaCombine, UpToTwoAddedResultsHaveTheBitsOfSlots) {
  const std::uint64_t seed = announced_seed();
  for (int i = 0; i < rounds(24) && !HasFailure(); ++i) {
    Chance chance(seed + static_cast<std::uint64_t>(i));
    Case c = with_added_results(mega_case(seed + static_cast<std::uint64_t>(i), chance.one_of({1, 2, 3, 8})));
    const bool alone = c.layer.shared_kind.has_value();
    c.layer.shape.topk = alone ? 1 : std::min(c.layer.shape.topk, 2);
    if (alone && c.layer.shared_intermediate == c.layer.shape.intermediate) c.options.shared = SharedMode::fused;
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const std::vector<bf16> added = run_layer(source, c, tokens, 3).outputs;
    EXPECT_EQ(different_bits(added, outputs_of_the_chain(source, c, tokens)), 0u) << text_of(c);
  }
}

// Against slots, whose reference they have, too: nothing but the roundings of additions lies between.
TEST(MegaCombine, MoreAddedResultsDifferByTheirRoundings) {
  const std::uint64_t seed = announced_seed();
  double most = 0;
  bool rounds_apart = false;  // a case was drawn in which most tokens have three choices and more
  for (int i = 0; i < rounds(16) && !HasFailure(); ++i) {
    Chance chance(seed + static_cast<std::uint64_t>(i));
    Case c = with_added_results(mega_case(seed + static_cast<std::uint64_t>(i), chance.between(1, 5)));
    if (c.layer.shared_kind == c.layer.kind && c.layer.shared_intermediate == c.layer.shape.intermediate && !c.gated_shared)
      c.options.shared = SharedMode::extra;
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const std::vector<bf16> added = run_layer(source, c, tokens).outputs;
    Case slots = c;
    slots.options.combine = Combine::slots;
    const Comparison comparison = compare(added, run_layer(source, slots, tokens).outputs);
    EXPECT_LE(comparison.relative_error, error_of_additions(c.layer.shape.topk)) << text_of(c);
    EXPECT_FALSE(comparison.has_nan_mismatch);
    most = std::max(most, comparison.relative_error);
    int several = 0;
    for (int token = 0; token < c.all_tokens(); ++token) {
      const auto* ids = tokens.routing.ids.data() + static_cast<std::ptrdiff_t>(token) * c.layer.shape.topk;
      several += std::count_if(ids, ids + c.layer.shape.topk, [](int id) { return id >= 0; }) > 2 ? 1 : 0;
    }
    rounds_apart |= several >= 8 && 2 * several >= c.all_tokens();
  }
  if (rounds_apart) {
    EXPECT_GT(most, 5e-4) << "every addition rounds";
  }
}

TEST(MegaCombine, AnInfinityStaysInItsToken) {
  Case c;
  c.layer.shape = {192, 128, 4, 2, std::nullopt};
  c.layer.kind = WeightKind::mxfp4;
  c.placement = Placement::contiguous(4, 2);
  c.options.cap = 6;
  c.tokens = {6, 6};
  c.missing = 0;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens sound = draw_tokens(c, 3);
  Tokens tokens = sound;
  tokens.hidden[3 * 192 + 5] = to_bf16(std::numeric_limits<float>::infinity());
  for (const Combine combine : {Combine::slots, Combine::add}) {
    for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
      if (combine == Combine::add && wire != Wire::bf16) continue;
      c.options.way = Way::mega;
      c.options.combine = combine;
      c.options.combine_wire = wire;
      const std::vector<bf16> wanted = run_layer(source, c, sound).outputs;
      const std::vector<bf16> outputs = run_layer(source, c, tokens).outputs;
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (i / 192 == 3) {
          ASSERT_TRUE(std::isnan(to_float(outputs[i]))) << i;
        } else {
          ASSERT_EQ(outputs[i].bits, wanted[i].bits) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle::layer_test
