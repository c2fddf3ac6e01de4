// Scalar conversions of the 8- and 4-bit formats, one source for host and device. They are free of
// branches, so that loops over them become vector code.
#pragma once

#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle {

inline constexpr std::uint8_t e4m3_nan = 0x7F;
inline constexpr std::uint8_t ue8m0_nan = 0xFF;

namespace detail {
/// Bits of |value|; as signed numbers they compare like the magnitudes, NaN above infinity.
HEDDLE_HOST_DEVICE inline std::int32_t magnitude_bits(float value) {
  return static_cast<std::int32_t>(float_bits(value) & 0x7FFFFFFFu);
}
inline constexpr std::int32_t infinity_bits = 0x7F800000;

/// a where the condition holds, else b, as arithmetic: compilers give up on loops where a choice
/// looks like a jump around a float operation.
HEDDLE_HOST_DEVICE inline std::uint32_t choose(bool condition, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}
HEDDLE_HOST_DEVICE inline std::uint32_t one_if(bool condition) { return static_cast<std::uint32_t>(condition); }
}  // namespace detail

/// Nearest e4m3 code, ties to the even code; beyond +-448 (infinities too) saturates, NaN is 0x7F, -0 is kept.
HEDDLE_HOST_DEVICE inline std::uint8_t to_e4m3(float value) {
  constexpr std::int32_t largest = 0x43E00000;          // 448
  constexpr std::int32_t smallest_normal = 0x3C800000;  // 2^-6
  constexpr float rounder = 16384.0f;                   // one unit of its last place is 2^-9, the subnormal step
  constexpr std::uint32_t rounder_bits = 0x46800000;
  const std::int32_t magnitude = detail::magnitude_bits(value);
  const auto clamped = static_cast<std::uint32_t>(magnitude < largest ? magnitude : largest);
  const std::uint32_t normal = ((clamped + 0x7FFFFu + ((clamped >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
  const std::uint32_t subnormal = float_bits(float_from_bits(clamped) + rounder) - rounder_bits;
  const std::uint32_t finite = detail::choose(magnitude < smallest_normal, subnormal, normal);
  const std::uint32_t sign = (float_bits(value) >> 24) & 0x80u;
  return static_cast<std::uint8_t>(detail::choose(magnitude > detail::infinity_bits, e4m3_nan, finite | sign));
}

/// The exact value of an e4m3 code; 0x7F and 0xFF are NaN.
HEDDLE_HOST_DEVICE inline float from_e4m3(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7Fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  const std::uint32_t subnormal = float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t finite = detail::choose(magnitude < 8u, subnormal, normal);
  return float_from_bits(detail::choose(magnitude == 0x7Fu, 0x7FC00000u, finite) | sign);
}

/// Nearest e2m1 code (0..15, bit 3 the sign), ties to the even code; beyond +-6 saturates, -0 is
/// kept. The format has no NaN: it gives 7 (+6), so a NaN has to be carried by a scale.
HEDDLE_HOST_DEVICE inline std::uint8_t to_e2m1(float value) {
  const float magnitude = float_from_bits(float_bits(value) & 0x7FFFFFFFu);
  // One more code from each midpoint between neighbours; a midpoint itself goes to its even side.
  const std::uint32_t code = detail::one_if(magnitude > 0.25f) + detail::one_if(magnitude >= 0.75f) +
                             detail::one_if(magnitude > 1.25f) + detail::one_if(magnitude >= 1.75f) +
                             detail::one_if(magnitude > 2.5f) + detail::one_if(magnitude >= 3.5f) +
                             detail::one_if(magnitude > 5.0f);
  const std::uint32_t sign = (float_bits(value) >> 28) & 8u;
  return static_cast<std::uint8_t>(detail::choose(detail::magnitude_bits(value) > detail::infinity_bits, 7u, code | sign));
}

/// The exact value of an e2m1 code; bits above the low four are ignored.
HEDDLE_HOST_DEVICE inline float from_e2m1(std::uint8_t code) {
  const std::uint32_t magnitude = code & 7u;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 8u) << 28;
  const std::uint32_t normal = (magnitude << 22) + (126u << 23);
  const std::uint32_t below_one = magnitude == 0u ? 0u : 0x3F000000u;  // 0 or 0.5
  return float_from_bits((magnitude < 2u ? below_one : normal) | sign);
}

/// The power of two of a ue8m0 byte: 2^(code - 127), exact also for 0 (an f32 subnormal); 0xFF is NaN.
HEDDLE_HOST_DEVICE inline float from_ue8m0(std::uint8_t code) {
  const std::uint32_t normal = static_cast<std::uint32_t>(code) << 23;
  const std::uint32_t finite = code == 0 ? 0x00400000u : normal;
  return float_from_bits(code == ue8m0_nan ? 0x7FC00000u : finite);
}

/// The smallest power of two that is at least s (s >= 0). NaN, infinity and anything above 2^127 give 0xFF.
HEDDLE_HOST_DEVICE inline std::uint8_t ue8m0_at_least(float s) {
  constexpr std::int32_t smallest = 0x00400000;  // 2^-127, code 0, is a subnormal: its exponent field is 0 as well
  const std::int32_t bits = detail::magnitude_bits(s);
  const std::int32_t raised = (bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  const std::int32_t code = bits <= smallest ? 0 : raised;
  return static_cast<std::uint8_t>(code > 0xFF ? 0xFF : code);
}

}  // namespace heddle
