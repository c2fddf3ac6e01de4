// Scalar conversions, against a search over all codes that knows nothing of how they are made.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "formats/codes.hpp"

namespace {

using heddle::float_bits;
using heddle::float_from_bits;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// The value of a small float's magnitude code, from its definition.
double small_float(int code, int mantissa_bits, int bias) {
  const int exponent = code >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}
double e4m3_value(int magnitude) { return small_float(magnitude, 3, 7); }
double e2m1_value(int magnitude) { return small_float(magnitude, 1, 1); }

/// The nearest of the codes 0..largest, the even one on a tie, the largest beyond its value.
int nearest_code(double magnitude, int largest, double (*value)(int)) {
  if (magnitude >= value(largest)) return largest;
  int best = 0;
  for (int code = 1; code <= largest; ++code) {
    const double distance = std::abs(value(code) - magnitude), best_distance = std::abs(value(best) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best;
}
int slow_e4m3(float v) {
  if (std::isnan(v)) return 0x7F;
  const int sign = std::signbit(v) ? 0x80 : 0;
  return sign | nearest_code(std::abs(double{v}), 0x7E, e4m3_value);
}
int slow_e2m1(float v) {
  const int sign = std::signbit(v) ? 8 : 0;
  return sign | nearest_code(std::abs(double{v}), 7, e2m1_value);
}

/// Every exponent and sign with random mantissas, and a step around each midpoint between codes.
std::vector<float> probes() {
  const std::uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  std::vector<float> floats;
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 200; ++i) floats.push_back(float_from_bits((exponent << 23) | (random() & 0x807FFFFFu)));
  }
  for (int i = 0; i < 20000; ++i) {  // where e4m3 and e2m1 live
    floats.push_back(float_from_bits(((112u + random() % 26u) << 23) | (random() & 0x807FFFFFu)));
  }
  const auto add_around = [&floats](float middle) {
    for (const float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, infinity)}) {
      floats.push_back(v);
      floats.push_back(-v);
    }
  };
  for (int code = 0; code < 0x7F; ++code) add_around(static_cast<float>((e4m3_value(code) + e4m3_value(code + 1)) / 2));
  for (int code = 0; code < 7; ++code) add_around(static_cast<float>((e2m1_value(code) + e2m1_value(code + 1)) / 2));
  return floats;
}

TEST(E4m3, EveryCodeRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const float value = heddle::from_e4m3(static_cast<std::uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(heddle::to_e4m3(value), 0x7F);
      continue;
    }
    EXPECT_EQ(std::abs(value), e4m3_value(code & 0x7F)) << code;
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    EXPECT_EQ(heddle::to_e4m3(value), code);
  }
}

TEST(E4m3, NearestWithTiesToEven) {
  for (const float v : probes()) ASSERT_EQ(heddle::to_e4m3(v), slow_e4m3(v)) << std::hexfloat << v;
}

TEST(E4m3, Edges) {
  EXPECT_EQ(heddle::to_e4m3(448.0f), 0x7E);
  EXPECT_EQ(heddle::to_e4m3(464.0f), 0x7E);  // halfway to 480, which does not exist
  EXPECT_EQ(heddle::to_e4m3(1e30f), 0x7E);
  EXPECT_EQ(heddle::to_e4m3(infinity), 0x7E);
  EXPECT_EQ(heddle::to_e4m3(-infinity), 0xFE);
  EXPECT_EQ(heddle::to_e4m3(nan_value), 0x7F);
  EXPECT_EQ(heddle::to_e4m3(-nan_value), 0x7F);
  EXPECT_EQ(heddle::to_e4m3(0.0f), 0x00);
  EXPECT_EQ(heddle::to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(heddle::to_e4m3(0x1p-9f), 0x01);
  EXPECT_EQ(heddle::to_e4m3(0x1p-10f), 0x00);    // tie between 0 and the first subnormal
  EXPECT_EQ(heddle::to_e4m3(0x1.8p-9f), 0x02);   // tie between the first two subnormals
  EXPECT_EQ(heddle::to_e4m3(0x1.EFp-7f), 0x08);  // rounds up into the normal range
  EXPECT_EQ(heddle::to_e4m3(1.0625f), 0x38);     // tie between 1 and 1.125
  EXPECT_EQ(heddle::to_e4m3(-1.1875f), 0xBA);    // tie between 1.125 and 1.25
  EXPECT_EQ(heddle::to_e4m3(-0x1p-149f), 0x80);
}

TEST(E2m1, EveryCodeRoundTrips) {
  for (int code = 0; code < 16; ++code) {
    const float value = heddle::from_e2m1(static_cast<std::uint8_t>(code));
    EXPECT_EQ(std::abs(value), e2m1_value(code & 7)) << code;
    EXPECT_EQ(std::signbit(value), code >= 8) << code;
    EXPECT_EQ(heddle::to_e2m1(value), code);
    EXPECT_EQ(float_bits(heddle::from_e2m1(static_cast<std::uint8_t>(code | 0xF0))), float_bits(value)) << "high bits count";
  }
}

TEST(E2m1, NearestWithTiesToEven) {
  for (const float v : probes()) ASSERT_EQ(heddle::to_e2m1(v), slow_e2m1(v)) << std::hexfloat << v;
}

TEST(E2m1, Edges) {
  const std::vector<std::pair<float, int>> ties = {{0.25f, 0}, {0.75f, 2}, {1.25f, 2}, {1.75f, 4}, {2.5f, 4}, {3.5f, 6}, {5.0f, 6}};
  for (const auto& [middle, code] : ties) {
    EXPECT_EQ(heddle::to_e2m1(middle), code) << middle;
    EXPECT_EQ(heddle::to_e2m1(-middle), code | 8) << -middle;
  }
  EXPECT_EQ(heddle::to_e2m1(6.5f), 7);
  EXPECT_EQ(heddle::to_e2m1(-infinity), 15);
  EXPECT_EQ(heddle::to_e2m1(-0.0f), 8);
  EXPECT_EQ(heddle::to_e2m1(0x1p-149f), 0);
  EXPECT_EQ(heddle::to_e2m1(nan_value), 7);
  EXPECT_EQ(heddle::to_e2m1(-nan_value), 7);
}

TEST(Ue8m0, EveryCodeRoundTrips) {
  for (int code = 0; code < 255; ++code) {
    const float value = heddle::from_ue8m0(static_cast<std::uint8_t>(code));
    EXPECT_EQ(double{value}, std::ldexp(1.0, code - 127));
    EXPECT_EQ(heddle::ue8m0_at_least(value), code);
  }
  EXPECT_TRUE(std::isnan(heddle::from_ue8m0(0xFF)));
  EXPECT_EQ(heddle::ue8m0_at_least(nan_value), 0xFF);
  EXPECT_EQ(heddle::ue8m0_at_least(-nan_value), 0xFF);
  EXPECT_EQ(heddle::ue8m0_at_least(infinity), 0xFF);
}

TEST(Ue8m0, SmallestPowerThatReaches) {
  for (const float probe : probes()) {
    const float s = std::abs(probe);
    const int code = heddle::ue8m0_at_least(s);
    if (s > 0x1p127f) {
      ASSERT_EQ(code, 0xFF) << std::hexfloat << s;
      continue;
    }
    ASSERT_GE(std::ldexp(1.0, code - 127), s) << std::hexfloat << s;
    ASSERT_TRUE(code == 0 || std::ldexp(1.0, code - 128) < s) << std::hexfloat << s;
  }
  EXPECT_EQ(heddle::ue8m0_at_least(0.0f), 0);
  EXPECT_EQ(heddle::ue8m0_at_least(0x1p-149f), 0);
  EXPECT_EQ(heddle::ue8m0_at_least(std::nextafter(0x1p-127f, 1.0f)), 1);
  EXPECT_EQ(heddle::ue8m0_at_least(std::nextafter(1.0f, 2.0f)), 128);
}

TEST(Bf16, EveryCodeRoundTrips) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const heddle::bf16 code{static_cast<std::uint16_t>(bits)};
    const float value = heddle::to_float(code);
    ASSERT_EQ(float_bits(value), bits << 16);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(heddle::to_float(heddle::to_bf16(value))));
    } else {
      ASSERT_EQ(heddle::to_bf16(value).bits, bits);
    }
  }
}

TEST(Bf16, NearestWithTiesToEven) {
  for (const float v : probes()) {
    const std::uint16_t down = static_cast<std::uint16_t>(float_bits(v) >> 16);  // toward zero
    const std::uint16_t up = static_cast<std::uint16_t>(down + 1);
    const double low = heddle::to_float({down});
    const double high = (up & 0x7FFF) == 0x7F80 ? std::copysign(0x1p128, low) : heddle::to_float({up});
    const double to_low = std::abs(v - low), to_high = std::abs(high - v);
    const bool takes_low = to_low < to_high || (to_low == to_high && down % 2 == 0);
    ASSERT_EQ(heddle::to_bf16(v).bits, takes_low ? down : up) << std::hexfloat << v;
  }
  EXPECT_EQ(heddle::to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(heddle::to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_TRUE(std::isnan(heddle::to_float(heddle::to_bf16(float_from_bits(0x7F800001u)))));  // its payload would be cut off
}

}  // namespace
