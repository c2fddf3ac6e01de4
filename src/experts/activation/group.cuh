// What every kernel that activates shares, whichever layout of threads it has: the step's own kernels and the epilogue of
// a fused product call these functions, and so give the same bits. Every result depends on its own arguments alone, not on
// which values a thread computes beside it.
#pragma once

#include <cstdint>

#include "experts/activation/clamp.hpp"
#include "experts/activation/group_scale.hpp"
#include "experts/activation/short_silu.hpp"
#include "signal/ptx.cuh"

namespace heddle {

namespace detail {
// Minima and maxima that NaN passes, of two f32 or of two pairs of bf16.
__device__ inline float lesser(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ inline float greater(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
__device__ inline std::uint32_t lesser_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t least;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
}
__device__ inline std::uint32_t greater_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t most;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

template <int pairs>
__device__ inline void widen_pairs(const std::uint32_t (&from)[pairs], float (&to)[2 * pairs]) {
#pragma unroll
  for (int i = 0; i < pairs; ++i) {
    to[2 * i] = float_from_bits(from[i] << 16);
    to[2 * i + 1] = float_from_bits(from[i] & 0xFFFF0000u);
  }
}
}  // namespace detail

/// activations[i] = gates[i] / (1 + exp(-gates[i])): short_silu or long_silu, each by its own size.
template <int count>
__device__ inline void silu_of(const float (&gates)[count], float (&activations)[count]) {
  bool all_short = true;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    activations[i] = short_silu(gates[i]);
    all_short &= fabsf(gates[i]) <= largest_short_gate;
  }
  if (all_short) return;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (!(fabsf(gates[i]) <= largest_short_gate)) activations[i] = long_silu(gates[i]);
  }
}

/// values[i] = SwiGLU of gate i and up i times the routing weight. Gates and ups are the bf16 results of GEMM 1, two a word,
/// the even one in the low half; without weights `weight` is 1.
template <int pairs>
__device__ inline void activate(std::uint32_t (&gates)[pairs], std::uint32_t (&ups)[pairs], const DeviceClamp& clamp, float weight,
                                float (&values)[2 * pairs]) {
  if (clamp.kind == ClampKind::pairs) {
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      gates[i] = detail::lesser_pair(gates[i], clamp.most);
      ups[i] = detail::greater_pair(detail::lesser_pair(ups[i], clamp.most), clamp.least);
    }
  }
  float g[2 * pairs], u[2 * pairs];
  detail::widen_pairs(gates, g);
  detail::widen_pairs(ups, u);
  if (clamp.kind == ClampKind::wide) {
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      g[i] = detail::lesser(g[i], clamp.limit);
      u[i] = detail::greater(detail::lesser(u[i], clamp.limit), -clamp.limit);
    }
  }
  silu_of(g, values);
#pragma unroll
  for (int i = 0; i < 2 * pairs; ++i) values[i] = values[i] * u[i] * weight;
}

/// The largest magnitude so far; NaN counts as nothing. Begin with 0. Maxima of maxima likewise, so lanes may meet in any order.
__device__ inline float largest_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }

/// Codes of two values, `low`'s in bits 0-7 and `high`'s in bits 8-15.
template <ScaleFormat format>
__device__ inline std::uint32_t codes_of_pair(const GroupScale<format>& scale, float low, float high) {
  return ptx::to_e4m3_pair(scale.quotient(low), scale.quotient(high));
}

}  // namespace heddle
