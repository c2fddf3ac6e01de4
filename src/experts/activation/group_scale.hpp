// The scale of an fp8 group and its values' codes with few instructions: the bits of the rules in formats/group.hpp,
// which stay the definition (tests/experts_group_scale_test.cpp holds one against the other). On a GPU these run for
// every value, and the rules' divisions would take a third of the step's instructions.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/group.hpp"

namespace heddle {

namespace detail {
HEDDLE_HOST_DEVICE inline float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

/// 1 / value within a unit of the last place, for a value whose reciprocal is a normal number.
HEDDLE_HOST_DEVICE inline float rough_reciprocal(float value) {
#if defined(__CUDA_ARCH__)
  float rough;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(value));
  return rough;
#else
  return 1.0f / value;
#endif
}
/// The same within half a unit and a little.
HEDDLE_HOST_DEVICE inline float reciprocal(float value) {
  const float rough = rough_reciprocal(value);
  return fused_multiply_add(rough, fused_multiply_add(-value, rough, 1.0f), rough);
}

/// a / b for b > 0, given about 1 / b, where neither the quotient nor the remainder is subnormal or overflows: a first
/// quotient, corrected by its exact remainder. It is the correctly rounded one, but for one in millions that lies all but in
/// the middle between two numbers. Zero keeps its sign.
HEDDLE_HOST_DEVICE inline float divide_by_reciprocal(float a, float b, float reciprocal_of_b) {
  const float quotient = a * reciprocal_of_b;
  return fused_multiply_add(-reciprocal_of_b, fused_multiply_add(b, quotient, -a), quotient);
}
}  // namespace detail

/// The scale of one group, made of its largest magnitude (>= 0, never NaN), and what makes codes with it.
template <ScaleFormat format>
struct GroupScale;

template <>
struct GroupScale<ScaleFormat::ue8m0> {
  std::uint32_t byte = 0;  ///< as stored
  float inverse = 0;       ///< 1 / scale, exact

  /// The next power of two above amax / 448 = amax / (1.75 * 2^8): the exponent of amax less 8, and one more where its
  /// mantissa is above 1.75. Rounding the quotient first, as the rule does, changes none of that.
  HEDDLE_HOST_DEVICE static GroupScale of(float largest) {
    const std::uint32_t bits = float_bits(group_amax(static_cast<std::int32_t>(float_bits(largest))));
    const std::uint32_t code = ((bits + 0x1FFFFFu) >> 23) - 8u;
    const bool finite = bits < static_cast<std::uint32_t>(detail::infinity_bits);
    return {finite ? code : ue8m0_nan, float_from_bits(finite ? (254u - code) << 23 : 0x7FC00000u)};
  }
  /// What the code is rounded from.
  HEDDLE_HOST_DEVICE float quotient(float value) const { return value * inverse; }
};

template <>
struct GroupScale<ScaleFormat::f32> {
  float scale = 0;  ///< as stored
  float inverse = 0;

  HEDDLE_HOST_DEVICE static GroupScale of(float largest) {
    const float amax = group_amax(static_cast<std::int32_t>(float_bits(largest)));
    constexpr float reciprocal_of_448 = 1.0f / 448.0f;
    const float exact = detail::divide_by_reciprocal(amax, 448.0f, reciprocal_of_448);
    const bool finite = detail::magnitude_bits(amax) < detail::infinity_bits;
    const float scale = finite ? exact : float_from_bits(0x7FC00000u);
    return {scale, detail::reciprocal(scale)};
  }
  /// What the code is rounded from. A quotient too small to be right is far below the least code; only its sign counts.
  HEDDLE_HOST_DEVICE float quotient(float value) const { return detail::divide_by_reciprocal(value, scale, inverse); }
};

}  // namespace heddle
