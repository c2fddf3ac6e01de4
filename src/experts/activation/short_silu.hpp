// silu() as GPUs compute it, in a third of the instructions of the rule in swiglu.hpp and without its branches: on a GPU the step
// is bound by them. It is about as accurate (tests/experts_silu_test.cpp); as with the rule itself, engines differ in the last bits
// of the exponential.
#pragma once

#include <cmath>

#include "experts/activation/group_scale.hpp"

namespace heddle {

namespace detail {
HEDDLE_HOST_DEVICE inline float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return std::exp2(x);
#endif
}
}  // namespace detail

/// 1 + exp(-gate): log2(e) is a number of 16 bits, whose product with a gate of 8, a bf16 value, is exact, and a rest so small that
/// exp(-gate * rest) is all but 1 - gate * rest. Gates that a clamp has given more bits lose as many units of the last place
/// as they are large. With a large gate the exponential is 0 whatever its correction, but for infinity.
HEDDLE_HOST_DEVICE inline float short_silu_divisor(float gate) {
  constexpr float log2_e = 47274.0f / 32768.0f;
  constexpr float rest = static_cast<float>(0.693147180559945 * (1.44269504088896 - 47274.0 / 32768.0));
  constexpr float large = 128.0f;
  const float correction = detail::fused_multiply_add(std::fmin(gate, large), -rest, 1.0f);
  return detail::fused_multiply_add(detail::power_of_two(gate * -log2_e), correction, 1.0f);
}

/// Where exp(-gate) is above the range of f32, and from some 2^126 on, this is -0, as the rule is a little later.
HEDDLE_HOST_DEVICE inline float short_silu(float gate) { return gate * detail::rough_reciprocal(short_silu_divisor(gate)); }

}  // namespace heddle
