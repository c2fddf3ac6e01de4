// Whole layers: tiny ones computed by hand, random ones against the naive reading of the rules, and
// deliberate mistakes, which must show.
#include <gtest/gtest.h>

#include <limits>

#include "heddle/error.hpp"
#include "reference_naive.hpp"
#include "reference_support.hpp"

namespace heddle::test {
namespace {

bf16 as_bf16(double value) { return to_bf16(static_cast<float>(value)); }

/// One token with x[0] and x[1], one expert with a few entries, the routing weight `weight`.
Case tiny(double x0, double x1, const std::vector<Entry>& gate, const std::vector<Entry>& up, const std::vector<Entry>& down,
          float weight) {
  Case layer;
  layer.tokens = 1;
  layer.hidden_states.assign(64, bf16{});
  layer.hidden_states[0] = as_bf16(x0);
  layer.hidden_states[1] = as_bf16(x1);
  layer.experts.push_back({sparse_matrix(64, 64, gate), sparse_matrix(64, 64, up), sparse_matrix(64, 64, down)});
  layer.rank_of = {0};
  layer.ids = {0};
  layer.weights = {weight};
  return layer;
}

void expect_only(const std::vector<bf16>& output, std::size_t index, float value) {
  for (std::size_t i = 0; i < output.size(); ++i) {
    EXPECT_EQ(to_float(output[i]), i == index ? value : 0.0f) << "output " << i;
  }
}

TEST(Tiny, Bf16ActivationsStepByStep) {
  // gate = 1 + 2^-8, a tie, becomes 1; up = 2; v = 2 / (1 + e^-1) = 1.46212, times 0.5 = 0.73106, in
  // bf16 187 / 256; times 3 = 2.19141 lies on a tie of steps of 2^-6 and becomes 140 / 64.
  const Case layer = tiny(1.0, 0x1p-8, {{0, 0, 1.0}, {0, 1, 1.0}}, {{0, 0, 2.0}}, {{3, 0, 3.0}}, 0.5f);
  ReferenceOptions options;
  options.activation = Activation::bf16;
  expect_only(layer.run(options), 3, 2.1875f);
  // With the weight at the sum: v = 1.46212 becomes 187 / 128, times 3 = 4.38281 becomes 4.375, times 0.5.
  options.weight_at = WeightAt::combine;
  expect_only(layer.run(options), 3, 2.1875f);
}

TEST(Tiny, Fp8ActivationsStepByStep) {
  // x is 3 and 0.30078125, which becomes 0.3125 under the scale 2^-7. gate = 1.5, up = 0.3125 and
  // v = 1.5 / (1 + e^-1.5) * 0.3125 = 0.38324. Its scale is 2^-10: 392.4 becomes 384, that is 0.375.
  const Case layer = tiny(3.0, 0.3, {{0, 0, 0.5}}, {{0, 1, 1.0}}, {{5, 0, 5.0}}, 1.0f);
  expect_only(layer.run({}), 5, 1.875f);
}

TEST(Tiny, ClampsBeforeTheActivation) {
  // gate 12 becomes 10 and up -20 becomes -10: v = -100 / (1 + e^-10) = -99.9955, in bf16 -100.
  const Case layer = tiny(4.0, 0.0, {{0, 0, 3.0}, {1, 0, -3.0}}, {{0, 0, -5.0}, {1, 0, 0.25}}, {{9, 0, 1.0}, {9, 1, 0.0}}, 1.0f);
  ReferenceOptions options;
  options.activation = Activation::bf16;
  options.clamp = 10.0f;
  expect_only(layer.run(options), 9, -100.0f);
  options.clamp.reset();
  expect_only(layer.run(options), 9, -240.0f);
}

TEST(Tiny, ClampLeavesTheGateBelow) {
  // gate = -12 is not raised to -10: v = -12 / (1 + e^12) * 10 = -7.37301e-4, -193.28 steps of 2^-18.
  const Case layer = tiny(4.0, 1.0, {{0, 0, -3.0}}, {{0, 1, 10.0}}, {{0, 0, 1.0}}, 1.0f);
  ReferenceOptions options;
  options.activation = Activation::bf16;
  options.clamp = 10.0f;
  expect_only(layer.run(options), 0, -193.0f * 0x1p-18f);
}

TEST(Tiny, AddsTheGatedSharedExpertLast) {
  Case layer = tiny(1.0, 0x1p-8, {{0, 0, 1.0}, {0, 1, 1.0}}, {{0, 0, 2.0}}, {{3, 0, 3.0}}, 0.5f);
  layer.shared.push_back(layer.experts[0]);
  layer.shared_intermediate = 64;
  ReferenceOptions options;
  options.activation = Activation::bf16;
  // Its weight is 1: 4.375 as above, and 2.1875 of the routed expert: 6.5625.
  expect_only(layer.run(options), 3, 6.5625f);
  // The gate: sigmoid(1 + 2^-8) = 0.731826, times 4.375 = 3.20174, and 2.1875: 5.38924 becomes 5.375.
  layer.shared_gate.assign(64, 0.0f);
  layer.shared_gate[0] = layer.shared_gate[1] = 1.0f;
  expect_only(layer.run(options), 3, 5.375f);
  // A token without a choice has the shared expert alone: 3.20174 becomes 3.203125.
  layer.ids = {-1};
  expect_only(layer.run(options), 3, 3.203125f);
}

/// Three experts on two ranks that give 1, 2^-8 and 2^-8: the sums show where they round.
TEST(Tiny, RoundsPartialSumsOfRanks) {
  // gate 64 saturates the sigmoid: v = 64 · up exactly in f32.
  Case layer = tiny(1.0, 0.0, {{0, 0, 64.0}}, {{0, 0, 1.0}}, {{0, 0, 1.0 / 64}}, 1.0f);
  layer.experts.push_back(
      {sparse_matrix(64, 64, {{0, 0, 64.0}}), sparse_matrix(64, 64, {{0, 0, 0x1p-8}}), sparse_matrix(64, 64, {{0, 0, 1.0 / 64}})});
  layer.experts.push_back(layer.experts[1]);
  layer.topk = 3;
  layer.ids = {0, 1, 2};
  layer.weights = {1.0f, 1.0f, 1.0f};
  layer.rank_of = {0, 0, 1};
  ReferenceOptions options;
  options.activation = Activation::bf16;
  expect_only(layer.run(options), 0, 1.0f + 0x1p-7f);  // one rounding of 1 + 2^-7
  options.sum = Sum::two_stage;
  expect_only(layer.run(options), 0, 1.0f);  // 1 + 2^-8 becomes 1, twice
  layer.rank_of = {1, 0, 0};
  expect_only(layer.run(options), 0, 1.0f + 0x1p-7f);
}

// ---- random layers against the naive reading -------------------------------------------------------

template <class Value>
Value one_of(Random& random, std::initializer_list<Value> values) {
  return *(values.begin() + draw(random, 0, static_cast<int>(values.size()) - 1));
}

ReferenceOptions random_options(Random& random) {
  ReferenceOptions options;
  options.activation = one_of(random, {Activation::fp8, Activation::bf16});
  options.quantisation = {one_of(random, {128, 32}), one_of(random, {ScaleFormat::ue8m0, ScaleFormat::f32})};
  options.clamp = one_of<std::optional<float>>(random, {std::nullopt, 1.5f});
  options.weight_at = one_of(random, {WeightAt::activation, WeightAt::combine});
  options.sum = one_of(random, {Sum::slots, Sum::two_stage});
  options.wire = one_of(random, {Wire::bf16, Wire::fp8, Wire::nvfp4});
  options.combine_wire = one_of(random, {Wire::bf16, Wire::fp8, Wire::nvfp4});
  options.wire_global_scale = one_of(random, {1.0f, 0.25f});
  options.shared_activation = one_of<std::optional<Activation>>(random, {std::nullopt, Activation::fp8, Activation::bf16});
  return options;
}

WeightKind random_kind(Random& random) {
  return one_of(random, {WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4, WeightKind::nvfp4, WeightKind::mxfp8});
}

TEST(Naive, AgreesOnRandomLayers) {
  Random random(announced_seed());
  for (int round = 0; round < 60; ++round) {
    const int experts = draw(random, 1, 5);
    const Sizes sizes{64 * draw(random, 1, 3), 64 * draw(random, 1, 3),  experts,
                      draw(random, 0, 4),      draw(random, 1, experts), draw(random, 1, 4)};
    Case layer = random_case(sizes, random_kind(random), random);
    if (draw(random, 0, 1) == 0) {
      add_shared(layer, random_kind(random), 64 * draw(random, 1, 3), draw(random, 0, 1) == 0, random);
    }
    const ReferenceOptions options = random_options(random);
    const Comparison comparison = compare(layer.run(options), Naive(layer, options).run());
    EXPECT_EQ(comparison.different_bits, 0U) << "round " << round << ": relative error " << comparison.relative_error;
  }
}

/// The error of an engine that would make the mistake.
double error_of(const Case& layer, const ReferenceOptions& options, Mistake mistake) {
  return compare(Naive(layer, options, mistake).run(), layer.run(options)).relative_error;
}

/// An engine is allowed 6e-3 with fp8 activations and 4e-3 with bf16.
TEST(Mistakes, InRoundingShowAboveTheBound) {
  Random random(announced_seed());
  const Case layer = random_case({256, 256, 4, 64, 2, 2}, WeightKind::mxfp4, random);
  const ReferenceOptions options;
  EXPECT_LT(error_of(layer, options, Mistake::none), 1e-5);
  for (const Mistake mistake :
       {Mistake::gate_up_unrounded, Mistake::v_unquantised, Mistake::scale_rounded_down, Mistake::weight_after_gemm}) {
    EXPECT_GT(error_of(layer, options, mistake), 6e-3) << "mistake " << static_cast<int>(mistake);
  }
}

TEST(Mistakes, InTheClampShowAboveTheBound) {
  Random random(announced_seed());
  const Case layer = random_case({256, 256, 4, 16, 2, 2}, WeightKind::mxfp4, random);
  ReferenceOptions options;
  options.clamp = 1.5f;
  for (const Activation activation : {Activation::fp8, Activation::bf16}) {
    options.activation = activation;
    EXPECT_LT(error_of(layer, options, Mistake::none), 1e-5);
    EXPECT_GT(error_of(layer, options, Mistake::no_clamp), 6e-3);
    EXPECT_GT(error_of(layer, options, Mistake::clamp_one_sided), 6e-3);
  }
}

}  // namespace
}  // namespace heddle::test
