// What weight matrices mean, value by value, and that the tile kernels agree in every bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "experts/host/kernels.hpp"
#include "experts/host/tile.hpp"
#include "experts_support.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

using testing::OwnedWeights;
using testing::Random;

/// e4m3 from its definition: 4 exponent bits biased by 7, 3 of mantissa, all ones NaN.
double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

double e2m1_value(int code) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return ((code & 8) != 0 ? -1.0 : 1.0) * magnitudes[code & 7];
}

/// Column `column` of row `row` from the definition of its kind.
double expected_value(const WeightMatrix& weights, int row, int column) {
  const std::size_t index =
      static_cast<std::size_t>(row) * static_cast<std::size_t>(weights.cols) + static_cast<std::size_t>(column);
  const auto byte = [](std::span<const std::byte> from, std::size_t i) { return static_cast<int>(from[i]); };
  const auto nibble = [&] { return (byte(weights.values, index / 2) >> (index % 2 == 0 ? 0 : 4)) & 15; };
  const auto scale = [&](int group) {
    return byte(weights.scales, static_cast<std::size_t>(row * ((weights.cols + group - 1) / group) + column / group));
  };
  switch (weights.kind) {
    case WeightKind::bf16: {
      const std::uint32_t bits =
          static_cast<std::uint32_t>(byte(weights.values, 2 * index) | (byte(weights.values, 2 * index + 1) << 8)) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    case WeightKind::fp8_block:
      return e4m3_value(byte(weights.values, index));
    case WeightKind::mxfp4:
      return std::ldexp(e2m1_value(nibble()), scale(32) - 127);
    case WeightKind::nvfp4:
      return e2m1_value(nibble()) * e4m3_value(scale(16));
    case WeightKind::mxfp8:
      return std::ldexp(e4m3_value(byte(weights.values, index)), scale(32) - 127);
  }
  return 0;
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

TEST(Weights, RowsWidenExactly) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const WeightKind kind : testing::all_kinds) {
    for (const int cols : {64, 128, 144, 320, 40}) {  // 144: a short group of 16; 40: of 8
      const int rows = testing::pick(random, 1, 200);
      const OwnedWeights weights = testing::random_weights(random, kind, rows, cols);
      ASSERT_NO_THROW(check_weights(weights.view, rows, cols, "weights"));
      for (int row = 0; row < rows; ++row) {
        const int begin = testing::pick(random, 0, cols - 1);
        const int end = testing::pick(random, begin, cols);
        std::vector<float> out(static_cast<std::size_t>(cols), -1.0f);
        widen_row(weights.view, row, begin, end, out.data());
        for (int column = begin; column < end; ++column) {
          ASSERT_EQ(static_cast<double>(out[static_cast<std::size_t>(column - begin)]), expected_value(weights.view, row, column))
              << "kind " << static_cast<int>(kind) << " cols " << cols << " row " << row << " column " << column;
        }
        ASSERT_TRUE(end - begin == cols || out[static_cast<std::size_t>(end - begin)] == -1.0f) << "wrote past the end";
      }
    }
  }
}

TEST(Weights, PromotionScales) {
  Random random(7);
  for (const ScaleFormat format : {ScaleFormat::f32, ScaleFormat::ue8m0}) {
    const int rows = 320;  // 2 blocks and a half, 3 and a half
    const int cols = 448;
    const OwnedWeights weights = testing::random_weights(random, WeightKind::fp8_block, rows, cols, format);
    ASSERT_EQ(weights.scales.size(), format == ScaleFormat::f32 ? 3u * 4u * 4u : 3u * 4u);
    for (int row = 0; row < rows; ++row) {
      for (int step = 0; step < 4; ++step) {
        const std::size_t block = static_cast<std::size_t>(row / 128 * 4 + step);
        float expected;
        if (format == ScaleFormat::f32) {
          std::memcpy(&expected, weights.scales.data() + 4 * block, 4);
        } else {
          expected = std::ldexp(1.0f, static_cast<int>(weights.scales[block]) - 127);
        }
        ASSERT_EQ(promotion_scale(weights.view, row, step), expected) << "row " << row << " step " << step;
      }
    }
  }
  for (const WeightKind kind : {WeightKind::bf16, WeightKind::mxfp4, WeightKind::mxfp8}) {
    EXPECT_EQ(promotion_scale(testing::random_weights(random, kind, 4, 256).view, 3, 1), 1.0f);
  }
  EXPECT_EQ(promotion_scale(testing::random_weights(random, WeightKind::nvfp4, 4, 256).view, 3, 1), 0.0123f);
}

TEST(Weights, KernelsAgreeWithWidenRow) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const TileKernels& kernels : all_tile_kernels()) {
    for (const WeightKind kind : testing::all_kinds) {
      for (int round = 0; round < 20; ++round) {
        const int cols = 8 * testing::pick(random, 1, 60);
        const int rows = testing::pick(random, 1, 40);
        OwnedWeights weights = testing::random_weights(random, kind, rows, cols);
        for (std::byte& code : weights.values) {  // every code, NaN too
          code = static_cast<std::byte>(testing::pick(random, 0, 255));
        }
        if (kind != WeightKind::fp8_block) {
          for (std::byte& scale : weights.scales) {
            scale = static_cast<std::byte>(testing::pick(random, 0, 255));
          }
        }
        const int begin = 32 * testing::pick(random, 0, (cols - 1) / 32);
        const int count = std::min(tile::step, cols - begin);
        const int first = testing::pick(random, 0, rows - 1);
        std::vector<float> out(static_cast<std::size_t>((rows - first) * tile::step), -1.0f);
        std::vector<float> expected(static_cast<std::size_t>(count));
        kernels.widen_weights(weights.view, first, rows - first, begin, count, out.data());
        for (int row = first; row < rows; ++row) {
          widen_row(weights.view, row, begin, begin + count, expected.data());
          const float* got = out.data() + static_cast<std::size_t>(row - first) * tile::step;
          for (int i = 0; i < count; ++i) {
            const bool both_nan = std::isnan(got[i]) && std::isnan(expected[static_cast<std::size_t>(i)]);
            ASSERT_TRUE(both_nan || same_bits(got[i], expected[static_cast<std::size_t>(i)]))
                << kernels.name << " kind " << static_cast<int>(kind) << " row " << row << " column " << begin + i;
          }
          ASSERT_TRUE(count == tile::step || got[count] == -1.0f) << kernels.name << " wrote past the end";
        }
      }
    }
  }
}

TEST(Weights, KernelsPromoteAndRoundAlike) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  std::normal_distribution<float> normal;
  for (const int count : {1, 7, 64, 128, 131}) {
    const auto draw = [&] {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& value : values) {
        value = normal(random);
      }
      return values;
    };
    const std::vector<float> partial = draw();
    const std::vector<float> before = draw();
    for (const TileKernels& kernels : all_tile_kernels()) {
      std::vector<float> sum = before;
      kernels.promote(partial.data(), 1.7f, count, sum.data());
      std::vector<bf16> rounded(sum.size());
      kernels.round(sum.data(), count, rounded.data());
      for (std::size_t i = 0; i < sum.size(); ++i) {
        ASSERT_TRUE(same_bits(sum[i], std::fma(partial[i], 1.7f, before[i]))) << kernels.name;
        ASSERT_EQ(rounded[i].bits, to_bf16(sum[i]).bits) << kernels.name;
      }
    }
  }
}

TEST(Weights, WrongSizesAreNamed) {
  Random random(3);
  OwnedWeights weights = testing::random_weights(random, WeightKind::mxfp4, 64, 128);
  EXPECT_THROW(check_weights(weights.view, 128, 64, "expert 0, gate"), InputError);
  weights.view.scales = weights.view.scales.first(weights.view.scales.size() - 1);
  try {
    check_weights(weights.view, 64, 128, "expert 0, gate");
    FAIL() << "short scales were accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("expert 0, gate"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("256"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace heddle
