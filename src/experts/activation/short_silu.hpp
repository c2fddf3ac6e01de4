// silu() as GPUs compute it, with half the instructions of the rule in swiglu.hpp and without its branches. It is as accurate
// (tests/experts_silu_test.cpp); as with the rule itself, engines differ in the last bits of the exponential.
#pragma once

#include <cmath>

#include "experts/activation/group_scale.hpp"
#include "experts/activation/swiglu.hpp"

namespace heddle {

/// For larger gates, infinity and NaN there is long_silu.
inline constexpr float largest_short_gate = 64.0f;

namespace detail {
/// 2^x for |x| <= 1/2 and a little.
HEDDLE_HOST_DEVICE inline float small_power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return std::exp2(x);
#endif
}
}  // namespace detail

/// 1 + exp(-gate): exp(x) = 2^whole * 2^rest with x * log2(e) = whole + rest, the product taken with 48 bits of log2(e).
HEDDLE_HOST_DEVICE inline float short_silu_divisor(float gate) {
  constexpr float log2_e = 1.44269502f, log2_e_rest = 1.92596303e-8f;
  // Adding 1.5 * 2^23 rounds to a whole number, whose bits are then the lowest; the 127 make them an exponent.
  constexpr float shift = 12582912.0f + 127.0f;
  const float shifted = detail::fused_multiply_add(-gate, log2_e, shift);
  const float whole = shifted - shift;
  const float rest = detail::fused_multiply_add(-gate, log2_e_rest, detail::fused_multiply_add(-gate, log2_e, -whole));
  const float scale = float_from_bits(float_bits(shifted) << 23);
  return detail::fused_multiply_add(scale, detail::small_power_of_two(rest), 1.0f);
}

/// Of |gate| <= largest_short_gate.
HEDDLE_HOST_DEVICE inline float short_silu(float gate) {
  const float divisor = short_silu_divisor(gate);
  return detail::divide_by_reciprocal(gate, divisor, detail::rough_reciprocal(divisor));
}

/// Of all others: 1 + exp(-gate) is 1 or exp(-gate) there. Where that overflows the rule gives -0, and this less than 1e-36.
HEDDLE_HOST_DEVICE inline float long_silu(float gate) { return gate > 0.0f ? gate : gate * std::exp(gate); }

}  // namespace heddle
