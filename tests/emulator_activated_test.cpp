// Gate and up activated in the epilogue of the Hopper tile engine, run thread by thread on the host: the bits of the step by
// itself.
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "emulator_products.hpp"

namespace heddle::sm90 {
namespace {

struct Activated {
  Activation format = Activation::fp8;
  Quantisation quantisation;
  bool clamped = false;
  bool weighted = false;
};

/// Rows of values and of scales with gaps between, and one row more that is nobody's; poison everywhere at first.
struct ActivatedRows {
  std::size_t value_stride;
  std::size_t scale_stride;
  std::vector<std::byte> values;
  std::vector<std::byte> scales;

  ActivatedRows(const Inputs& in, const Activated& wanted) {
    const std::size_t width = size(in.wanted.rows);
    const std::size_t group = size(wanted.quantisation.group);
    const std::size_t scale_bytes = wanted.quantisation.scale == ScaleFormat::f32 ? 4 : 1;
    value_stride = width * (in.plan.shape().operand == Operand::bf16 ? 2 : 1) + 16;
    scale_stride = (wanted.format == Activation::bf16 ? 0 : (width + group - 1) / group * scale_bytes) + 4;
    values.assign(size(in.tokens + 1) * value_stride, std::byte{0xAB});
    scales.assign(size(in.tokens + 1) * scale_stride, std::byte{0xAB});
  }
};

/// v of a row: gate and up, as bf16, through the step's own function.
std::vector<float> activated_row(const float* gate, int width, const DeviceClamp& clamp, float weight) {
  std::vector<float> v(size(width));
  for (std::size_t i = 0; i < size(width); ++i) {
    std::uint32_t gates[1] = {ptx::to_bf16_pair(gate[i], 0.0f)};
    std::uint32_t ups[1] = {ptx::to_bf16_pair(gate[size(width) + i], 0.0f)};
    float pair[2];
    activate(gates, ups, clamp, weight, pair);
    v[i] = pair[0];
  }
  return v;
}

void store_bf16(std::byte* to, std::size_t i, float value) {
  const bf16 narrow = to_bf16(value);
  std::memcpy(to + 2 * i, &narrow, sizeof narrow);
}

/// What the epilogue has to leave: codes (with bf16 operands widened to bf16) and scales, or bf16 values.
ActivatedRows expected_rows(const Inputs& in, const Activated& wanted, const DeviceClamp& clamp,
                            const std::vector<float>& weights) {
  const int width = in.wanted.rows;
  const bool wide = in.plan.shape().operand == Operand::bf16;
  ActivatedRows expected(in, wanted);
  const std::vector<float> sums = all_sums(in);
  std::vector<std::uint8_t> codes(size(width));
  for (int row = 0; row < in.tokens; ++row) {
    const float weight = wanted.weighted ? weights[size(row)] : 1.0f;
    const std::vector<float> v = activated_row(sums.data() + size(row) * 2 * size(width), width, clamp, weight);
    std::byte* to = expected.values.data() + size(row) * expected.value_stride;
    if (wanted.format == Activation::bf16) {
      for (std::size_t i = 0; i < size(width); ++i) store_bf16(to, i, v[i]);
      continue;
    }
    quantise_fp8(v.data(), width, wanted.quantisation, codes.data(), expected.scales.data() + size(row) * expected.scale_stride);
    for (std::size_t i = 0; i < size(width); ++i) {
      if (wide) {
        store_bf16(to, i, from_e4m3(codes[i]));
      } else {
        to[i] = static_cast<std::byte>(codes[i]);
      }
    }
  }
  return expected;
}

/// Some of them make groups whose largest magnitude is 0, infinite or not there.
std::vector<float> draw_weights(Random& random, int count) {
  constexpr float rare[] = {0.0f, -3.0f, 1e5f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  std::vector<float> weights(size(count));
  for (float& weight : weights) {
    weight = pick(random, 0, 3) == 0 ? rare[pick(random, 0, 4)] : 0.01f * static_cast<float>(pick(random, 1, 100));
  }
  return weights;
}

template <class Shape>
void check_activated(const Inputs& in, const Activated& wanted, unsigned seed) {
  Random random(seed);
  const std::vector<float> weights = draw_weights(random, in.tokens);
  const DeviceClamp clamp = DeviceClamp::of(wanted.clamped ? std::optional(0.5f) : std::nullopt);
  const ActivatedRows expected = expected_rows(in, wanted, clamp, weights);

  ActivatedRows made(in, wanted);
  ProductCall call;
  call.weights = in.matrix();
  call.tokens = in.rows(pick(random, 0, 1) == 0 ? 0 : Shape::box_rows);
  call.counts = in.wanted.counts.data();
  call.experts = static_cast<int>(in.wanted.counts.size());
  ActivatedStore& store = call.activated;
  store.format = wanted.format;
  store.quantisation = wanted.quantisation;
  store.clamp = clamp;
  store.weights = wanted.weighted ? weights.data() : nullptr;
  store.values = made.values.data();
  store.value_stride = made.value_stride;
  store.scales = made.scales.data();
  store.scale_stride = made.scale_stride;
  run<Shape>(call, pick(random, 1, 2), seed, Products::at_wait);
  int wrong = 0;
  for (std::size_t i = 0; i < made.values.size(); ++i) {
    if (made.values[i] != expected.values[i] && ++wrong <= 5) {
      ADD_FAILURE() << "row " << i / made.value_stride << ", byte " << i % made.value_stride << ": "
                    << static_cast<int>(made.values[i]) << ", expected " << static_cast<int>(expected.values[i]);
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(made.scales == expected.scales);
}

template <WeightKind kind>
void check_activations(const Case& wanted, const Activated& activated, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "kind " << static_cast<int>(kind) << ", seed " << seed);
  Random random(seed);
  const Inputs in(random, wanted);
  check_activated<SmallBlocks<kind, true>>(in, activated, seed);
  check_activated<LargeBlocks<kind, true>>(in, activated, seed + 1);
  if constexpr (has_medium_blocks(kind)) check_activated<MediumBlocks<kind, true>>(in, activated, seed + 2);
  if constexpr (kind == WeightKind::bf16)
    check_activated<BySlab<LargeBlocks<kind, true>>>(in, activated, seed + 3);  // the fused layer's
}

TEST(ActivatedSums, GroupsOf128) {
  const unsigned seed = std::random_device{}();
  const Case uneven{WeightKind::mxfp4, true, 320, 128, {5, 0, 100}, TokenScales::by_128};
  check_activations<WeightKind::mxfp4>(uneven, {Activation::fp8, {128, ScaleFormat::ue8m0}, true, true}, seed);
  check_activations<WeightKind::fp8_block>({WeightKind::fp8_block, true, 192, 192, {3, 9}, TokenScales::by_128},
                                           {Activation::fp8, {128, ScaleFormat::f32}, false, false}, seed + 10);
}

TEST(ActivatedSums, OfTheUsualCall) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Inputs in(random, {WeightKind::mxfp4, true, 320, 256, {5, 0, 12, 21, 29, 68}, TokenScales::by_128});
  using Small = Plain<SmallBlocks<WeightKind::mxfp4, true>>;
  check_activated<Small>(in, {Activation::fp8, {128, ScaleFormat::ue8m0}, true, true}, seed);
  check_activated<Small>(in, {Activation::fp8, {128, ScaleFormat::ue8m0}, false, false}, seed);
}

// A row block of every size of tile, and two of one expert.
TEST(ActivatedSums, OfTheUsualCallInMediumBlocks) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Inputs in(random, {WeightKind::mxfp4, true, 320, 256, {9, 0, 21, 32, 45, 61, 90}, TokenScales::by_128});
  using Medium = Plain<MediumBlocks<WeightKind::mxfp4, true>>;
  check_activated<Medium>(in, {Activation::fp8, {128, ScaleFormat::ue8m0}, true, true}, seed);
  check_activated<Medium>(in, {Activation::fp8, {128, ScaleFormat::ue8m0}, false, false}, seed);
}

TEST(ActivatedSums, GroupsOf32) {
  check_activations<WeightKind::mxfp4>({WeightKind::mxfp4, true, 192, 128, {10, 70}, TokenScales::by_32},
                                       {Activation::fp8, {32, ScaleFormat::ue8m0}, false, true}, std::random_device{}());
}

TEST(ActivatedSums, Bf16) {
  const unsigned seed = std::random_device{}();
  check_activations<WeightKind::bf16>({WeightKind::bf16, true, 192, 128, {6, 35}, TokenScales::none},
                                      {Activation::bf16, {}, true, true}, seed);
  check_activations<WeightKind::nvfp4>({WeightKind::nvfp4, true, 64, 128, {6}, TokenScales::by_128},
                                       {Activation::fp8, {}, false, true}, seed + 10);
}

}  // namespace
}  // namespace heddle::sm90
