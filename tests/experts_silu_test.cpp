// The short SwiGLU of GPUs against float64 and against the rule, for every gate there is: gates are bf16 values.
#include "experts/activation/short_silu.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "experts/activation/swiglu.hpp"

namespace heddle {
namespace {

double units_apart(double a, double b) {
  const double unit = std::ldexp(1.0, std::max(std::ilogb(b), -126) - 23);
  return std::abs(a - b) / unit;
}

TEST(Silu, EveryGateIsAsGoodAsTheRule) {
  double worst = 0, worst_rule = 0;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float gate = float_from_bits(bits << 16);
    if (!std::isfinite(gate)) continue;
    const double wide = gate;
    const double exact = wide / (1 + std::exp(-wide));
    if (std::abs(exact) < 0x1p-120 && gate < 0) {  // the rule's exponential overflows there
      EXPECT_LE(short_silu(gate), 0.0f) << gate;
      EXPECT_GE(short_silu(gate), -0x1p-119f) << gate;
      continue;
    }
    worst = std::max(worst, units_apart(short_silu(gate), exact));
    worst_rule = std::max(worst_rule, units_apart(silu(gate), exact));
    EXPECT_LE(units_apart(short_silu(gate), exact), 3.0) << gate;
    EXPECT_EQ(std::signbit(short_silu(gate)), std::signbit(gate)) << gate;
  }
  std::printf("units of the last place from float64, at most: short %.2f, rule %.2f\n", worst, worst_rule);
}

TEST(Silu, WhatIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(short_silu(infinity), infinity);
  EXPECT_TRUE(std::isnan(short_silu(-infinity)));
  EXPECT_TRUE(std::isnan(silu(-infinity)));
  EXPECT_TRUE(std::isnan(short_silu(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace heddle
