// What must hold of the reference whatever the numbers: symmetries, equalities between options,
// containment of NaN and infinity, refusals; and the comparison itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "heddle/error.hpp"
#include "reference_support.hpp"

namespace heddle::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr bf16 nan_bits{0x7FC0};
constexpr bf16 infinity_bits{0x7F80};

std::size_t differing(const std::vector<bf16>& a, const std::vector<bf16>& b) { return compare(a, b).different_bits; }

Case usual_case(Random& random) {
  Case layer = random_case({192, 128, 6, 9, 3, 3}, WeightKind::mxfp4, random);
  add_shared(layer, WeightKind::bf16, 64, true, random);
  return layer;
}

TEST(Layer, IsZeroWhereWeightsAreZero) {
  Random random(announced_seed());
  Case layer = random_case({128, 128, 4, 5, 2, 2}, WeightKind::fp8_block, random);
  const std::vector<bf16> zeros(layer.hidden_states.size());
  std::fill(layer.weights.begin(), layer.weights.end(), 0.0f);
  for (const WeightAt weight_at : {WeightAt::activation, WeightAt::combine}) {
    ReferenceOptions options;
    options.weight_at = weight_at;
    EXPECT_EQ(differing(layer.run(options), zeros), 0U);  // +0, since sums start there
  }
}

TEST(Layer, DoesNotDependOnTheNamesOfExperts) {
  Random random(announced_seed());
  const Case layer = usual_case(random);
  std::vector<std::int32_t> new_name(layer.experts.size());
  std::iota(new_name.begin(), new_name.end(), 0);
  std::shuffle(new_name.begin(), new_name.end(), random);
  Case renamed = layer;
  for (std::size_t e = 0; e < layer.experts.size(); ++e) {
    renamed.experts[static_cast<std::size_t>(new_name[e])] = layer.experts[e];
    renamed.rank_of[static_cast<std::size_t>(new_name[e])] = layer.rank_of[e];
  }
  std::transform(layer.ids.begin(), layer.ids.end(), renamed.ids.begin(),
                 [&](std::int32_t id) { return id < 0 ? id : new_name[static_cast<std::size_t>(id)]; });
  for (const Sum sum : {Sum::slots, Sum::two_stage}) {
    ReferenceOptions options;
    options.sum = sum;
    EXPECT_EQ(differing(renamed.run(options), layer.run(options)), 0U);
  }
}

TEST(Layer, TakesMinusOneAsNoChoice) {
  Random random(announced_seed());
  Case layer = random_case({128, 64, 5, 6, 2, 2}, WeightKind::mxfp8, random);
  Case wider = layer;  // the same choices with a -1 before, between and behind
  wider.topk = 5;
  wider.ids.clear();
  wider.weights.clear();
  for (std::size_t pair = 0; pair < layer.ids.size(); pair += 2) {
    wider.ids.insert(wider.ids.end(), {-1, layer.ids[pair], -1, layer.ids[pair + 1], -1});
    wider.weights.insert(wider.weights.end(), {infinity, layer.weights[pair], -infinity, layer.weights[pair + 1], 7.0f});
  }
  EXPECT_EQ(differing(wider.run({}), layer.run({})), 0U);
  std::fill(layer.ids.begin(), layer.ids.end(), -1);
  EXPECT_EQ(differing(layer.run({}), std::vector<bf16>(layer.hidden_states.size())), 0U);
}

TEST(Layer, ComputesEachTokenAlone) {
  Random random(announced_seed());
  const Case layer = usual_case(random);
  const std::vector<bf16> together = layer.run({});
  const auto hidden = static_cast<std::size_t>(layer.hidden);
  const auto topk = static_cast<std::size_t>(layer.topk);
  for (std::size_t token = 0; token < static_cast<std::size_t>(layer.tokens); ++token) {
    Case alone = layer;
    alone.tokens = 1;
    const std::span<const bf16> states = std::span(layer.hidden_states).subspan(token * hidden, hidden);
    const std::span<const std::int32_t> ids = std::span(layer.ids).subspan(token * topk, topk);
    const std::span<const float> weights = std::span(layer.weights).subspan(token * topk, topk);
    alone.hidden_states.assign(states.begin(), states.end());
    alone.ids.assign(ids.begin(), ids.end());
    alone.weights.assign(weights.begin(), weights.end());
    EXPECT_EQ(compare(alone.run({}), std::span(together).subspan(token * hidden, hidden)).different_bits, 0U) << "token " << token;
  }
}

TEST(Layer, DoesNotDependOnThreadsOrTaskSizes) {
  Random random(announced_seed());
  Case layer = random_case({64, 64, 2, 150, 2, 1}, WeightKind::nvfp4, random);  // more rows than a task takes
  ReferenceOptions options;
  options.threads = 1;
  const std::vector<bf16> one = layer.run(options);
  options.threads = 5;
  EXPECT_EQ(differing(layer.run(options), one), 0U);
}

TEST(Layer, KindsAgreeWhereTheyHoldTheSameNumbers) {
  Random random(announced_seed());
  for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::mxfp8}) {  // both exact in bf16
    Case layer = random_case({128, 192, 3, 4, 2, 1}, kind, random);
    const std::vector<bf16> as_stored = layer.run({});
    for (Expert& expert : layer.experts) {
      for (Matrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        *matrix = bf16_matrix(matrix->form.rows, matrix->form.cols, matrix->exact);
      }
    }
    EXPECT_EQ(differing(layer.run({}), as_stored), 0U);
  }
}

TEST(Sums, TwoStagesOnOneRankAreSlots) {
  Random random(announced_seed());
  Case layer = random_case({128, 64, 5, 8, 3, 1}, WeightKind::mxfp4, random);
  for (const WeightAt weight_at : {WeightAt::activation, WeightAt::combine}) {
    ReferenceOptions options;
    options.weight_at = weight_at;
    const std::vector<bf16> slots = layer.run(options);
    options.sum = Sum::two_stage;
    EXPECT_EQ(differing(layer.run(options), slots), 0U);
  }
}

TEST(Sums, TwoStagesWithARankAnExpertAreSlots) {
  Random random(announced_seed());
  Case layer = usual_case(random);
  std::iota(layer.rank_of.begin(), layer.rank_of.end(), 0);
  for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
    ReferenceOptions options;
    options.combine_wire = wire;
    const std::vector<bf16> slots = layer.run(options);
    options.sum = Sum::two_stage;
    EXPECT_EQ(differing(layer.run(options), slots), 0U);
  }
}

TEST(Wires, AnFp8WireCarriesWhatTheGemmTakes) {
  Random random(announced_seed());
  const Case layer = usual_case(random);
  for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
    for (const int group : {128, 32}) {
      ReferenceOptions options;
      options.quantisation = {group, scale};
      const std::vector<bf16> by_bf16 = layer.run(options);
      options.wire = Wire::fp8;
      EXPECT_EQ(differing(layer.run(options), by_bf16), 0U);
    }
  }
}

/// Each wire loses about what its mantissa says, and no wire touches the shared expert.
TEST(Wires, LoseWhatTheyShould) {
  Random random(announced_seed());
  Case layer = random_case({256, 128, 4, 32, 2, 2}, WeightKind::mxfp4, random);
  ReferenceOptions options;
  options.activation = Activation::bf16;
  const std::vector<bf16> exact = layer.run(options);
  const auto error = [&](Wire there, Wire back) {
    ReferenceOptions wired = options;
    wired.wire = there;
    wired.combine_wire = back;
    return compare(layer.run(wired), exact).relative_error;
  };
  EXPECT_EQ(error(Wire::bf16, Wire::bf16), 0.0);
  for (const auto& [fp8, nvfp4] : {std::pair{error(Wire::fp8, Wire::bf16), error(Wire::nvfp4, Wire::bf16)},
                                   std::pair{error(Wire::bf16, Wire::fp8), error(Wire::bf16, Wire::nvfp4)}}) {
    EXPECT_GT(fp8, 0.01);
    EXPECT_LT(fp8, 0.08);
    EXPECT_GT(nvfp4, 0.05);
    EXPECT_LT(nvfp4, 0.3);
  }
  add_shared(layer, WeightKind::bf16, 64, false, random);
  std::fill(layer.ids.begin(), layer.ids.end(), -1);
  const std::vector<bf16> shared_alone = layer.run(options);
  options.wire = options.combine_wire = Wire::nvfp4;
  EXPECT_EQ(differing(layer.run(options), shared_alone), 0U);
}

/// A NaN or an infinity in one token may spoil that token, and must leave the others' bits alone.
TEST(NotFinite, StaysInItsToken) {
  Random random(announced_seed());
  const Case layer = usual_case(random);
  const auto hidden = static_cast<std::size_t>(layer.hidden);
  for (const bf16 bad : {nan_bits, infinity_bits}) {
    for (const Activation activation : {Activation::fp8, Activation::bf16}) {
      for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
        ReferenceOptions options;
        options.activation = activation;
        options.wire = options.combine_wire = wire;
        options.clamp = 10.0f;
        const std::vector<bf16> clean = layer.run(options);
        Case spoiled = layer;
        spoiled.hidden_states[4 * hidden + 150] = bad;
        const std::vector<bf16> output = spoiled.run(options);
        for (std::size_t i = 0; i < output.size(); ++i) {
          if (i / hidden != 4) {
            ASSERT_EQ(output[i].bits, clean[i].bits) << "output " << i;
          } else if (bad.bits == nan_bits.bits || activation == Activation::fp8) {
            ASSERT_TRUE(std::isnan(to_float(output[i]))) << "output " << i;
          }
        }
      }
    }
  }
}

TEST(NotFinite, RoutingWeightsOfUnusedChoicesDoNotCount) {
  Random random(announced_seed());
  Case layer = usual_case(random);
  layer.ids[0] = -1;
  const std::vector<bf16> clean = layer.run({});
  layer.weights[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(differing(layer.run({}), clean), 0U);
}

/// Beyond the range of the exponential the gate gives -0 · up, as f32 does, and not a rest of double's range.
TEST(NotFinite, ExponentialsOverflowLikeF32) {
  Case layer;
  layer.tokens = 1;
  layer.hidden_states.assign(64, bf16{});
  layer.hidden_states[0] = to_bf16(1.0f);
  layer.experts.push_back(
      {sparse_matrix(64, 64, {{0, 0, -100.0}}), sparse_matrix(64, 64, {{0, 0, 0x1p127}}), sparse_matrix(64, 64, {{0, 0, 1.0}})});
  layer.ids = {0};
  layer.weights = {1.0f};
  ReferenceOptions options;
  options.activation = Activation::bf16;
  EXPECT_EQ(to_float(layer.run(options)[0]), 0.0f);
}

void expect_refused(const Case& layer, const ReferenceOptions& options, const std::string& part) {
  try {
    layer.run(options);
    ADD_FAILURE() << "accepted, though '" << part << "' was expected";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Refusals, NameTheNumbers) {
  Random random(7);
  const Case good = random_case({64, 64, 3, 2, 2, 1}, WeightKind::mxfp4, random);
  const auto changed = [&](const std::function<void(Case&)>& change) {
    Case layer = good;
    change(layer);
    return layer;
  };
  expect_refused(changed([](Case& layer) { layer.ids = {0, 1, 2, 3}; }), {}, "token 1 choice 1 has expert id 3");
  expect_refused(changed([](Case& layer) { layer.ids = {-2, 1, 2, 0}; }), {}, "token 0 choice 0 has expert id -2");
  expect_refused(changed([](Case& layer) { layer.ids = {0, 1, 2, 2}; }), {}, "token 1 chooses expert 2 twice");
  expect_refused(changed([](Case& layer) { layer.hidden = 96; }), {}, "hidden size is 96");
  expect_refused(changed([](Case& layer) { layer.weights.pop_back(); }), {}, "weights has 3 values");
  expect_refused(changed([](Case& layer) {
                   layer.ids = {0, 1, 2, 0};
                   layer.experts[2].up.scales.pop_back();
                 }),
                 {}, "up of expert 2");
  ReferenceOptions options;
  options.sum = Sum::two_stage;
  expect_refused(changed([](Case& layer) { layer.rank_of.clear(); }), options, "rank_of has 0 values");
  options = {};
  options.quantisation.group = 64;
  expect_refused(good, options, "group 64");
  options = {};
  options.wire_global_scale = 0.0f;
  expect_refused(good, options, "global scale is 0");
}

std::vector<bf16> values(const std::vector<float>& numbers) {
  std::vector<bf16> out(numbers.size());
  std::transform(numbers.begin(), numbers.end(), out.begin(), to_bf16);
  return out;
}

TEST(Compare, MeasuresDifferences) {
  const Comparison comparison = compare(values({3.0f, 4.5f, -0.0f}), values({3.0f, 4.0f, 0.0f}));
  EXPECT_DOUBLE_EQ(comparison.relative_error, 0.5 / 5.0);
  EXPECT_EQ(comparison.largest_difference, 0.5);
  EXPECT_EQ(comparison.different_bits, 2U);
  EXPECT_FALSE(comparison.has_nan_mismatch);
  EXPECT_EQ(compare({}, {}).relative_error, 0.0);
  EXPECT_EQ(compare(values({0.0f}), values({0.0f})).relative_error, 0.0);
  EXPECT_EQ(compare(values({1.0f}), values({0.0f})).relative_error, infinity);
  EXPECT_THROW(compare(values({1.0f}), {}), InputError);
}

TEST(Compare, WantsNanAndInfinityInPlace) {
  std::vector<bf16> b = values({1.0f, 2.0f, infinity});
  b[1] = nan_bits;
  std::vector<bf16> a = b;
  a[1].bits = 0xFFFF;  // another NaN
  EXPECT_EQ(compare(a, b).relative_error, 0.0);
  EXPECT_EQ(compare(a, b).different_bits, 0U);
  a[1] = b[0];
  EXPECT_TRUE(compare(a, b).has_nan_mismatch);
  EXPECT_EQ(compare(a, b).relative_error, infinity);
  EXPECT_EQ(compare(b, a).relative_error, infinity);
  a = b;
  a[2] = values({-infinity})[0];
  EXPECT_EQ(compare(a, b).relative_error, infinity);
  EXPECT_EQ(compare(a, b).largest_difference, infinity);
  EXPECT_FALSE(compare(a, b).has_nan_mismatch);
  a[2] = b[0];
  EXPECT_EQ(compare(a, b).relative_error, infinity);
  EXPECT_EQ(compare(b, a).relative_error, infinity);
}

}  // namespace
}  // namespace heddle::test
