// The short forms of the activation step's scales, codes and layouts against the rules that define them.
#include "experts/activation/group_scale.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "experts/activation/scale_layout.hpp"
#include "formats/group.hpp"

namespace heddle {
namespace {

/// Every `step`-th amax with this exponent, and its ends.
template <class Check>
void with_mantissas(std::uint32_t exponent, std::uint32_t step, const Check& check) {
  for (std::uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += step) check(float_from_bits(exponent << 23 | mantissa));
  check(float_from_bits(exponent << 23 | 0x7FFFFFu));
}

void expect_power_of_two(float amax) {
  const float rule = fp8_scale(group_amax(detail::magnitude_bits(amax)), ScaleFormat::ue8m0);
  const auto fast = GroupScale<ScaleFormat::ue8m0>::of(amax);
  ASSERT_EQ(fast.byte, fp8_scale_byte(rule)) << amax;
  ASSERT_EQ(float_bits(fast.inverse), float_bits(fp8_inverse(rule))) << amax;
}

void expect_f32(float amax) {
  const float rule = fp8_scale(group_amax(detail::magnitude_bits(amax)), ScaleFormat::f32);
  ASSERT_EQ(float_bits(GroupScale<ScaleFormat::f32>::of(amax).scale), float_bits(rule)) << amax;
}

TEST(GroupScale, PowerOfTwoOfEveryMantissa) { with_mantissas(127, 1, expect_power_of_two); }

TEST(GroupScale, F32OfEveryMantissa) { with_mantissas(127, 1, expect_f32); }

TEST(GroupScale, EveryExponent) {
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    with_mantissas(exponent, 40009, [](float amax) {
      expect_power_of_two(amax);
      expect_f32(amax);
    });
    // Around 1.75 times a power of two the scale's exponent changes.
    for (std::uint32_t mantissa = 0x5FFFF0u; mantissa < 0x600010u; ++mantissa) {
      expect_power_of_two(float_from_bits(exponent << 23 | mantissa));
      expect_f32(float_from_bits(exponent << 23 | mantissa));
    }
  }
  for (const float amax : {0.0f, 1e-10f, 9.9e-11f, std::numeric_limits<float>::denorm_min()}) {
    expect_power_of_two(amax);
    expect_f32(amax);
  }
}

TEST(GroupScale, InfinityMakesTheScaleNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(GroupScale<ScaleFormat::ue8m0>::of(infinity).byte, ue8m0_nan);
  EXPECT_EQ(to_e4m3(GroupScale<ScaleFormat::ue8m0>::of(infinity).quotient(1.0f)), e4m3_nan);
  expect_f32(infinity);
  EXPECT_EQ(to_e4m3(GroupScale<ScaleFormat::f32>::of(infinity).quotient(1.0f)), e4m3_nan);
}

TEST(GroupScale, CodesAreThoseOfTheDivision) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2'000'000; ++round) {
    const std::uint64_t bits = random();
    // An amax from 1e-10 up, and a value up to it; every fourth lies on or beside the tie between two codes.
    const float amax = float_from_bits(static_cast<std::uint32_t>(95 + (bits >> 32) % 158) << 23 | (bits & 0x7FFFFFu));
    const auto fast = GroupScale<ScaleFormat::f32>::of(amax);
    float value = amax * std::ldexp(static_cast<float>(random() >> 40) * 0x1p-24f, -static_cast<int>(random() % 24));
    if (round % 4 == 0) {
      const auto code = static_cast<std::uint8_t>(random() % 126);
      value = (from_e4m3(code) + from_e4m3(static_cast<std::uint8_t>(code + 1))) / 2 * fast.scale;
    }
    if (round % 2 == 0) value = -value;
    ASSERT_EQ(to_e4m3(fast.quotient(value)), fp8_code(value, fast.scale)) << "value " << value << " amax " << amax;
    const auto power = GroupScale<ScaleFormat::ue8m0>::of(amax);
    const float scale = fp8_scale(amax, ScaleFormat::ue8m0);
    ASSERT_EQ(to_e4m3(power.quotient(value)), fp8_code(value, scale)) << "value " << value << " amax " << amax;
  }
}

TEST(GroupScale, ZeroKeepsItsSignAndNanIsNan) {
  const auto scale = GroupScale<ScaleFormat::f32>::of(3.0f);
  EXPECT_EQ(to_e4m3(scale.quotient(-0.0f)), 0x80);
  EXPECT_EQ(to_e4m3(scale.quotient(0.0f)), 0x00);
  EXPECT_EQ(to_e4m3(scale.quotient(-std::numeric_limits<float>::denorm_min())), 0x80);
  EXPECT_EQ(to_e4m3(scale.quotient(std::numeric_limits<float>::quiet_NaN())), e4m3_nan);
}

// On a GPU the reciprocal comes from an instruction that may be off by a unit of the last place: codes must not care.
TEST(GroupScale, CodesForgiveTheReciprocal) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 1'000'000; ++round) {
    const float amax = float_from_bits(static_cast<std::uint32_t>(95 + random() % 158) << 23 | (random() & 0x7FFFFFu));
    const float value = amax * (static_cast<float>(random() >> 40) * 0x1p-24f);
    GroupScale<ScaleFormat::f32> scale = GroupScale<ScaleFormat::f32>::of(amax);
    for (int off = -1; off <= 1; ++off) {
      const float rough = float_from_bits(float_bits(1.0f / scale.scale) + static_cast<std::uint32_t>(off));
      scale.inverse = std::fma(rough, std::fma(-scale.scale, rough, 1.0f), rough);
      ASSERT_EQ(to_e4m3(scale.quotient(value)), fp8_code(value, scale.scale))
          << value << " / " << scale.scale << ", reciprocal off by " << off;
    }
  }
}

TEST(ScaleLayout, TheDescribedPlaces) {
  const ScaleLayout rows{ScaleOrder::row_major, ScaleFormat::f32, 23, 0};
  EXPECT_EQ(rows.offset(3, 5), 4u * (3 * 23 + 5));
  const ScaleLayout bytes{ScaleOrder::row_major, ScaleFormat::ue8m0, 23, 0};
  EXPECT_EQ(bytes.offset(3, 5), 3u * 23 + 5);
  const ScaleLayout columns{ScaleOrder::column_major, ScaleFormat::f32, 23, 40};
  EXPECT_EQ(columns.offset(3, 5), 4u * (5 * 40 + 3));
  const ScaleLayout packed{ScaleOrder::packed, ScaleFormat::ue8m0, 23, 40};
  EXPECT_EQ(packed.offset(3, 5), 4u * (1 * 40 + 3) + 1);
  EXPECT_EQ(packed.zeros_behind(22), 1);
  EXPECT_EQ(packed.zeros_behind(21), 0);
  EXPECT_EQ(columns.zeros_behind(22), 0);
}

TEST(ScaleLayout, PlacesAreDistinctAndWithin) {
  for (const ScaleOrder order : {ScaleOrder::row_major, ScaleOrder::column_major, ScaleOrder::packed}) {
    for (const ScaleFormat format : {ScaleFormat::f32, ScaleFormat::ue8m0}) {
      if ((order == ScaleOrder::column_major) != (format == ScaleFormat::f32) && order != ScaleOrder::row_major) continue;
      for (const int groups : {1, 3, 4, 16, 23}) {
        const ScaleLayout layout{order, format, groups, 12};
        std::set<std::size_t> seen;
        std::size_t written = 0;
        for (std::size_t row = 0; row < 10; ++row) {
          for (int group = 0; group < groups; ++group) {
            const std::size_t bytes = layout.bytes_a_scale() + static_cast<std::size_t>(layout.zeros_behind(group));
            for (std::size_t i = 0; i < bytes; ++i) seen.insert(layout.offset(row, group) + i);
            written += bytes;
          }
        }
        EXPECT_EQ(seen.size(), written) << groups;
        EXPECT_LT(*seen.rbegin(), layout.bytes(10)) << groups;
      }
    }
  }
}

}  // namespace
}  // namespace heddle
