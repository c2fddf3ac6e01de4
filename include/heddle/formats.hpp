// Number formats and their scalar conversions, one source for host and device.
// Rules: round to nearest even; e4m3 saturates to +-448 and turns NaN into 0x7F; e2m1 breaks ties
// to the even code; a ue8m0 byte is a power of two biased by 127, 0xFF is NaN.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define HEDDLE_HOST_DEVICE __host__ __device__
#else
#define HEDDLE_HOST_DEVICE
#endif

namespace heddle {

/// Storage of one bfloat16 value.
struct bf16 {
  std::uint16_t bits = 0;
};

/// Format of a row while it travels.
enum class Wire : std::uint8_t { bf16, fp8, nvfp4 };

/// Format of the scales of a group-quantised row: a power of two in a byte, or an f32.
enum class ScaleFormat : std::uint8_t { ue8m0, f32 };

/// How a checkpoint stores an expert weight matrix.
enum class WeightKind : std::uint8_t { bf16, fp8_block, mxfp4, nvfp4, mxfp8 };

/// The 32 bits of a float, and back; the device has its own instructions for them.
HEDDLE_HOST_DEVICE inline std::uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}

HEDDLE_HOST_DEVICE inline float float_from_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

HEDDLE_HOST_DEVICE inline float to_float(bf16 value) { return float_from_bits(static_cast<std::uint32_t>(value.bits) << 16); }

/// Nearest even; NaN stays NaN, -0 is kept.
HEDDLE_HOST_DEVICE inline bf16 to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  return {static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
}

}  // namespace heddle
