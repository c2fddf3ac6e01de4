// The rules of one group: from its largest magnitude to a scale, from a value and the scale to a
// code. Maxima are taken over integers, which are associative, so a warp and a loop agree in every bit.
#pragma once

#include <cstdint>

#include "formats/codes.hpp"
#include "heddle/formats.hpp"

namespace heddle {

namespace detail {
/// Correctly rounded division, whatever the device compiler was told.
HEDDLE_HOST_DEVICE inline float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
}  // namespace detail

/// What a value adds to its group's maximum, as ordered integers. fp8 ignores NaN, which has a code
/// of its own; e2m1 has none, so nvfp4 lets it through to the scale.
HEDDLE_HOST_DEVICE inline std::int32_t fp8_magnitude(float value) {
  const std::int32_t bits = detail::magnitude_bits(value);
  return bits > detail::infinity_bits ? 0 : bits;
}
HEDDLE_HOST_DEVICE inline std::int32_t nvfp4_magnitude(float value) { return detail::magnitude_bits(value); }

/// The group's amax from the largest magnitude: at least 1e-10.
HEDDLE_HOST_DEVICE inline float group_amax(std::int32_t largest_magnitude) {
  constexpr std::int32_t floor_bits = 0x2EDBE6FF;  // 1e-10f
  return float_from_bits(static_cast<std::uint32_t>(largest_magnitude > floor_bits ? largest_magnitude : floor_bits));
}

/// Scale of an fp8 group, as the f32 that multiplies its codes; NaN where amax is infinite.
HEDDLE_HOST_DEVICE inline float fp8_scale(float amax, ScaleFormat format) {
  const bool finite = detail::magnitude_bits(amax) < detail::infinity_bits;
  const float exact = finite ? detail::divide(amax, 448.0f) : float_from_bits(0x7FC00000u);
  return format == ScaleFormat::f32 ? exact : from_ue8m0(ue8m0_at_least(exact));
}

/// The byte of a scale that fp8_scale gave for ue8m0.
HEDDLE_HOST_DEVICE inline std::uint8_t fp8_scale_byte(float scale) { return static_cast<std::uint8_t>(float_bits(scale) >> 23); }

/// Code of a value under a power-of-two scale, given 1 / scale, which is exact: the product is the quotient.
HEDDLE_HOST_DEVICE inline std::uint8_t fp8_code_by_inverse(float value, float inverse) { return to_e4m3(value * inverse); }
HEDDLE_HOST_DEVICE inline float fp8_inverse(float power_of_two) {
  const std::uint32_t exponent = float_bits(power_of_two) >> 23;
  const bool plain = exponent >= 1 && exponent <= 253;  // both are normal numbers
  return plain ? float_from_bits((254u - exponent) << 23) : detail::divide(1.0f, power_of_two);
}

/// Code of a value under any scale.
HEDDLE_HOST_DEVICE inline std::uint8_t fp8_code(float value, float scale) { return to_e4m3(detail::divide(value, scale)); }

/// Scale byte (e4m3) of an nvfp4 group, at least 2^-9; NaN where amax is infinite or NaN.
HEDDLE_HOST_DEVICE inline std::uint8_t nvfp4_scale(float amax, float global_scale) {
  const bool finite = detail::magnitude_bits(amax) < detail::infinity_bits;
  const std::uint8_t code = to_e4m3(detail::divide(amax, 6.0f * global_scale));
  return finite ? (code == 0 ? std::uint8_t{1} : code) : e4m3_nan;
}

/// What the values of a group are divided by, and their codes.
HEDDLE_HOST_DEVICE inline float nvfp4_divisor(std::uint8_t scale, float global_scale) { return from_e4m3(scale) * global_scale; }
HEDDLE_HOST_DEVICE inline std::uint8_t nvfp4_code(float value, float divisor) { return to_e2m1(detail::divide(value, divisor)); }

/// The value of a code: the product with the e4m3 scale is exact, then one rounding by the global scale.
HEDDLE_HOST_DEVICE inline float nvfp4_value(std::uint8_t code, std::uint8_t scale, float global_scale) {
  return from_e2m1(code) * from_e4m3(scale) * global_scale;
}

}  // namespace heddle
