// The rounding points one by one: doubles to bf16, group quantisation, exact widening of weights.
#include "reference/rounding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "formats/rows.hpp"
#include "heddle/error.hpp"
#include "reference/weights.hpp"
#include "reference_support.hpp"

namespace heddle::test {
namespace {
using reference::round_to_bf16;
using reference::round_to_fp8;
using reference::round_to_nvfp4;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

TEST(Bf16, RoundsDoublesOnceAndTiesToEven) {
  EXPECT_EQ(to_float(round_to_bf16(1.0 + 0x1p-8)), 1.0f);                      // a tie, down to even
  EXPECT_EQ(to_float(round_to_bf16(1.0 + 3 * 0x1p-8)), 1.0f + 0x1p-6f);        // a tie, up to even
  EXPECT_EQ(to_float(round_to_bf16(1.0 + 0x1p-8 + 0x1p-50)), 1.0f + 0x1p-7f);  // by way of f32 it would be a tie
  EXPECT_EQ(to_float(round_to_bf16(1.0 + 3 * 0x1p-8 - 0x1p-50)), 1.0f + 0x1p-7f);
  EXPECT_EQ(to_float(round_to_bf16(-1.0 - 0x1p-8 - 0x1p-50)), -1.0f - 0x1p-7f);
}

TEST(Bf16, KeepsTheExtremes) {
  EXPECT_EQ(round_to_bf16(-0.0).bits, 0x8000);
  EXPECT_EQ(round_to_bf16(0x1p-133).bits, 0x0001);
  EXPECT_EQ(round_to_bf16(0x1p-134).bits, 0x0000);  // a tie with zero
  EXPECT_EQ(round_to_bf16(0x1.0000000001p-134).bits, 0x0001);
  EXPECT_EQ(round_to_bf16(1e300).bits, 0x7F80);
  EXPECT_EQ(round_to_bf16(-1e300).bits, 0xFF80);
  EXPECT_EQ(round_to_bf16(0x1.fep127).bits, 0x7F7F);
  EXPECT_EQ(round_to_bf16(0x1.fefp127).bits, 0x7F7F);
  EXPECT_EQ(round_to_bf16(0x1.ffp127).bits, 0x7F80);
  EXPECT_TRUE(std::isnan(to_float(round_to_bf16(std::numeric_limits<double>::quiet_NaN()))));
}

std::vector<double> fp8(const std::vector<float>& values, const Quantisation& quantisation) {
  std::vector<double> out(values.size());
  round_to_fp8(values, quantisation, out);
  return out;
}

TEST(Fp8Groups, RaiseTheScaleToAPowerOfTwo) {
  // 3 / 448 lies between 2^-8 and 2^-7; under 2^-7, 0.3 is 38.4 and the codes around it are 36 and 40.
  EXPECT_EQ(fp8({3.0f, -0.3f, 0.0f}, {}), (std::vector<double>{3.0, -0.3125, 0.0}));
  // 448 / 448 is a power of two already.
  EXPECT_EQ(fp8({448.0f, 17.0f}, {}), (std::vector<double>{448.0, 16.0}));
  // amax is at least 1e-10, whose scale is 2^-42: steps of 2^-51.
  EXPECT_EQ(fp8({0x1p-52f, 0x1.8p-51f}, {}), (std::vector<double>{0.0, 0x1p-50}));
}

TEST(Fp8Groups, UseTheQuotientItselfAsAnF32Scale) {
  const double scale = 3.0f / 448.0f;
  EXPECT_EQ(fp8({3.0f, 0.3f}, {128, ScaleFormat::f32}), (std::vector<double>{448.0 * scale, 44.0 * scale}));
}

TEST(Fp8Groups, GiveAShortLastGroupItsOwnScale) {
  std::vector<float> row(192, 0.0f);
  row[0] = 448.0f;             // a scale of 1, steps of 2^-9 near zero
  row[32] = row[128] = 1e-3f;  // under its own scale of 2^-18: 262.1, and the codes around it are 256 and 288
  const std::vector<double> by_128 = fp8(row, {});
  EXPECT_EQ(by_128[32], 0x1p-9);
  EXPECT_EQ(by_128[128], 0x1p-10);
  EXPECT_EQ(fp8(row, {32, ScaleFormat::ue8m0})[32], 0x1p-10);
}

TEST(Fp8Groups, KeepNanToItselfAndInfinityToItsGroup) {
  for (const ScaleFormat format : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
    std::vector<float> row(256, 1.75f);
    row[3] = nan_value;
    row[130] = -infinity;
    const std::vector<double> out = fp8(row, {128, format});
    for (std::size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(std::isnan(out[i]), i == 3 || i >= 128) << i;
    }
  }
}

TEST(Nvfp4Groups, RoundScaleAndValues) {
  // amax 6 gives the scale 1: ties go to the even code, so 2.5 becomes 2, 3.5 becomes 4 and 0.75 becomes 1.
  const std::vector<float> row{6.0f, 2.5f, -3.5f, 0.25f, 0.75f, 5.1f, 0.0f, 1.0f};
  const std::vector<float> rounded{6.0f, 2.0f, -4.0f, 0.0f, 1.0f, 6.0f, 0.0f, 1.0f};
  std::vector<float> out(row.size());
  round_to_nvfp4(row, 1.0f, out);
  EXPECT_EQ(out, rounded);
  round_to_nvfp4(row, 4.0f, out);  // the group's scale becomes 1/4
  EXPECT_EQ(out, rounded);
}

TEST(Nvfp4Groups, HaveASmallestScale) {
  std::vector<float> row{0x1p-10f, 0x1p-11f, 0x1.8p-11f};
  round_to_nvfp4(row, 1.0f, row);  // 2^-9: steps of 2^-10, ties to the even code
  EXPECT_EQ(row, (std::vector<float>{0x1p-10f, 0.0f, 0x1p-10f}));
}

TEST(Nvfp4Groups, CarryNanAndInfinityInTheScale) {
  for (const float bad : {nan_value, infinity}) {
    std::vector<float> row(48, 1.0f);
    row[20] = bad;
    round_to_nvfp4(row, 1.0f, row);
    for (std::size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(std::isnan(row[i]), i / 16 == 1) << i;
    }
  }
}

std::vector<float> wild_row(Random& random) {
  std::normal_distribution<float> gauss;
  std::vector<float> row(static_cast<std::size_t>(64 * draw(random, 1, 5)));
  for (float& value : row) {
    value = std::ldexp(gauss(random), draw(random, -30, 10));
    if (draw(random, 0, 200) == 0) {
      value = draw(random, 0, 1) == 0 ? nan_value : infinity;
    }
  }
  return row;
}

std::vector<float> by_the_library(const std::vector<float>& row, const RowFormat& format) {
  std::vector<std::byte> bytes(format.row_bytes());
  std::vector<float> out(row.size());
  quantise_row(row.data(), format, bytes.data());
  widen_row(bytes.data(), format, out.data());
  return out;
}

std::vector<float> by_the_reference(const std::vector<float>& row, const RowFormat& format) {
  std::vector<float> out(row.size());
  if (format.wire == Wire::nvfp4) {
    round_to_nvfp4(row, format.global_scale, out);
  } else {
    const std::vector<double> wide = fp8(row, format.quantisation);
    std::transform(wide.begin(), wide.end(), out.begin(), [](double value) { return static_cast<float>(value); });
  }
  return out;
}

/// The reference has group rules of its own; they and the library's must give the same numbers.
TEST(Groups, AgreeWithTheLibrarysRows) {
  Random random(announced_seed());
  for (int round = 0; round < 400; ++round) {
    const std::vector<float> row = wild_row(random);
    RowFormat format;
    format.wire = round % 2 == 0 ? Wire::fp8 : Wire::nvfp4;
    format.hidden = static_cast<int>(row.size());
    format.quantisation = {draw(random, 0, 1) == 0 ? 128 : 32, draw(random, 0, 1) == 0 ? ScaleFormat::ue8m0 : ScaleFormat::f32};
    format.global_scale = draw(random, 0, 1) == 0 ? 1.0f : 0.7f;
    const std::vector<float> library = by_the_library(row, format);
    const std::vector<float> own = by_the_reference(row, format);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const bool equal = std::bit_cast<std::uint32_t>(own[i]) == std::bit_cast<std::uint32_t>(library[i]);
      ASSERT_TRUE(equal || (std::isnan(own[i]) && std::isnan(library[i])))
          << "round " << round << " value " << i << ": " << own[i] << " and " << library[i];
    }
  }
}

TEST(Weights, WidenExactlyInEveryKind) {
  Random random(announced_seed());
  for (const WeightKind kind : {WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4, WeightKind::nvfp4, WeightKind::mxfp8}) {
    for (int round = 0; round < 4; ++round) {
      const Matrix matrix = random_matrix(kind, 192, 320, random);
      EXPECT_NO_THROW(reference::check_matrix(matrix.view(), 192, 320, "matrix"));
      std::vector<double> row(320);
      for (int n = 0; n < 192; ++n) {
        reference::exact_row(matrix.view(), n, row);
        for (int k = 0; k < 320; ++k) {
          ASSERT_EQ(row[static_cast<std::size_t>(k)], matrix.at(n, k))
              << "kind " << static_cast<int>(kind) << " at " << n << ", " << k;
        }
      }
    }
  }
}

TEST(Weights, RefuseWrongShapesAndSizes) {
  Random random(1);
  Matrix matrix = random_matrix(WeightKind::mxfp4, 64, 128, random);
  EXPECT_THROW(reference::check_matrix(matrix.view(), 128, 64, "matrix"), InputError);
  matrix.scales.pop_back();
  EXPECT_THROW(reference::check_matrix(matrix.view(), 64, 128, "matrix"), InputError);
  matrix = random_matrix(WeightKind::bf16, 64, 64, random);
  matrix.values.pop_back();
  EXPECT_THROW(reference::check_matrix(matrix.view(), 64, 64, "matrix"), InputError);
}

}  // namespace
}  // namespace heddle::test
