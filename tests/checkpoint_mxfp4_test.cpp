// The opt-in conversion of a shared expert to mxfp4.
#include <gtest/gtest.h>

#include <random>

#include "checkpoint_checks.hpp"

namespace heddle::testing {
namespace {

/// A bf16 expert of 64 x 64 matrices; every value of a group of 32 is set by the caller.
struct HandMadeExpert {
  std::vector<std::uint16_t> values = std::vector<std::uint16_t>(64 * 64);

  void set(int index, float value) { values[static_cast<std::size_t>(index)] = to_bf16(value).bits; }
  SharedExpert expert() const {
    WeightMatrix matrix;
    matrix.rows = matrix.cols = 64;
    matrix.values = std::as_bytes(std::span(values));
    SharedExpert shared;
    shared.weights = {matrix, matrix, matrix};
    shared.intermediate = 64;
    shared.gate = {1.0f, 2.0f};
    return shared;
  }
};

TEST(ToMxfp4, KnownGroups) {
  HandMadeExpert made;
  // Group 0 of row 0: amax 6, scale 1. Ties go to the even code, values between go to the nearest.
  const float inputs[] = {6, -6, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5, -5, 0.26f, 2.6f, 3.4f, -0.2f, 0, -0.0f};
  const float outputs[] = {6, -6, 0, 1, 1, 2, 2, 4, 4, -4, 0.5f, 3, 3, -0.0f, 0, -0.0f};
  for (int i = 0; i < 16; ++i) made.set(i, inputs[i]);
  made.set(32, 6.03125f);   // group 1: just above 6, so the scale is 2
  made.set(64, 0x1p-100f);  // row 1: small values keep their size
  const auto converted = to_mxfp4(made.expert());
  const WeightMatrix& gate = converted.weights.gate;
  EXPECT_EQ(gate.kind, WeightKind::mxfp4);
  const auto values = meaning(gate);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(values[i], outputs[i]) << inputs[i];
  EXPECT_EQ(std::to_integer<int>(gate.scales[0]), 127);
  EXPECT_EQ(std::to_integer<int>(gate.scales[1]), 128);
  EXPECT_EQ(values[32], 6.0f);
  EXPECT_EQ(std::to_integer<int>(gate.scales[3]), 127);  // nothing but zeros
  EXPECT_EQ(values[64], 0x1p-100f);
  EXPECT_EQ(converted.gate, made.expert().gate);
  EXPECT_EQ(converted.intermediate, 64);
}

TEST(ToMxfp4, NearestOfAllCodesForEveryKind) {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (const WeightKind kind : {WeightKind::bf16, WeightKind::fp8_block, WeightKind::nvfp4, WeightKind::mxfp8}) {
    LayerFileSpec spec;
    spec.shape = {192, 64, 1, 1, {}};
    spec.shared = kind;
    spec.shared_intermediate = 128;
    spec.seed = seed;
    const LayerFile file = write_layer(spec);
    SharedExpert converted;
    {
      const auto layer = LayerCheckpoint::open(file.path);
      converted = to_mxfp4(*layer.shared());
    }  // the checkpoint is gone, the converted weights stay
    const auto& before = file.shared->down.values;
    const auto after = meaning(converted.weights.down);
    ASSERT_EQ(after.size(), before.size());
    for (std::size_t group = 0; group < before.size(); group += 32) {
      float largest = 0;
      for (std::size_t i = group; i < group + 32; ++i) largest = std::max(largest, std::fabs(before[i]));
      float scale = 0x1p-126f;
      while (6.0f * scale < largest) scale *= 2;
      if (largest == 0) continue;
      ASSERT_EQ(std::ldexp(1.0f, std::to_integer<int>(converted.weights.down.scales[group / 32]) - 127), scale);
      for (std::size_t i = group; i < group + 32; ++i) {
        float nearest = 1e30f;
        for (int code = 0; code < 16; ++code)
          nearest = std::min(nearest, std::fabs(layer_detail::e2m1_value(code) * scale - before[i]));
        ASSERT_EQ(std::fabs(after[i] - before[i]), nearest) << before[i] << " with scale " << scale;
      }
    }
  }
}

TEST(ToMxfp4, Mxfp4StaysAndBadValuesAreRefused) {
  LayerFileSpec spec;
  spec.shape = {64, 64, 1, 1, {}};
  spec.shared = WeightKind::mxfp4;
  const LayerFile file = write_layer(spec);
  const auto layer = LayerCheckpoint::open(file.path);
  EXPECT_EQ(to_mxfp4(*layer.shared()).weights.up.values.data(), layer.shared()->weights.up.values.data());
  HandMadeExpert made;
  made.set(64 * 5 + 9, std::numeric_limits<float>::infinity());
  expect_refusal([&] { to_mxfp4(made.expert()); }, {"gate", "row 5, column 9", "inf"});
}

}  // namespace
}  // namespace heddle::testing
