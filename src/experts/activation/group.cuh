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
template <int pairs>
__device__ inline void widen_pairs(const std::uint32_t (&from)[pairs], float (&to)[2 * pairs]) {
#pragma unroll
  for (int i = 0; i < pairs; ++i) {
    to[2 * i] = float_from_bits(from[i] << 16);
    to[2 * i + 1] = float_from_bits(from[i] & 0xFFFF0000u);
  }
}
}  // namespace detail

/// values[i] = SwiGLU of gate i and up i times the routing weight. Gates and ups are the bf16 results of GEMM 1, two a word,
/// the even one in the low half; without weights `weight` is 1.
template <int pairs>
__device__ inline void activate(std::uint32_t (&gates)[pairs], std::uint32_t (&ups)[pairs], const DeviceClamp& clamp, float weight,
                                float (&values)[2 * pairs]) {
  if (clamp.kind == ClampKind::pairs) {
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      gates[i] = ptx::lesser_pair(gates[i], clamp.most);
      ups[i] = ptx::greater_pair(ptx::lesser_pair(ups[i], clamp.most), clamp.least);
    }
  }
  float g[2 * pairs], u[2 * pairs];
  detail::widen_pairs(gates, g);
  detail::widen_pairs(ups, u);
  if (clamp.kind == ClampKind::wide) {
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      g[i] = ptx::lesser(g[i], clamp.limit);
      u[i] = ptx::greater(ptx::lesser(u[i], clamp.limit), -clamp.limit);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * pairs; ++i) values[i] = short_silu(g[i]) * u[i] * weight;
}

/// The largest magnitude so far; NaN counts as nothing. Begin with 0. Maxima of maxima likewise, so lanes may meet in any order.
__device__ inline float largest_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }

/// Codes of two values, `low`'s in bits 0-7 and `high`'s in bits 8-15.
template <ScaleFormat format>
__device__ inline std::uint32_t codes_of_pair(const GroupScale<format>& scale, float low, float high) {
  return ptx::to_e4m3_pair(scale.quotient(low), scale.quotient(high));
}

}  // namespace heddle
