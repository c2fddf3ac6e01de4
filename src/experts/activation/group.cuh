// What every kernel that activates shares, whichever layout of threads it has: the step's own kernels and the epilogue of
// a fused product call these functions, value by value and group by group, and so give the same bits.
#pragma once

#include <cstdint>

#include "experts/activation/group_scale.hpp"
#include "experts/activation/swiglu.hpp"
#include "signal/ptx.cuh"

namespace heddle {

/// The clamp as one limit: infinity where there is none.
__device__ inline float lesser_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ inline float greater_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

/// activations[i] = g / (1 + exp(-g)) of some gates, all at once: the bits of silu(), whose division is correctly rounded
/// and is here the same without its branches, so that the values of a thread overlap. Where a quotient is so small that its
/// remainders may be (or zero, or not a number), all are divided by the rule itself.
template <int count>
__device__ inline void silu_of(const float (&gates)[count], float (&activations)[count]) {
  constexpr float least_certain = 0x1p-90f;
  bool certain = true;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float divisor = silu_divisor(gates[i]);
    activations[i] = detail::divide_by_reciprocal(gates[i], divisor, detail::reciprocal(divisor));
    certain = certain && fabsf(activations[i]) >= least_certain;
  }
  if (!certain) {
#pragma unroll
    for (int i = 0; i < count; ++i) activations[i] = silu(gates[i]);
  }
}

/// values[i] = SwiGLU of (gates[i], ups[i]) times the routing weight: bf16 results of GEMM 1, widened. `limit` is the clamp's,
/// infinity for none; without weights `weight` is 1.
template <int count>
__device__ inline void activate(const float (&gates)[count], const float (&ups)[count], float limit, float weight,
                                float (&values)[count]) {
  float clamped[count];
#pragma unroll
  for (int i = 0; i < count; ++i) clamped[i] = lesser_or_nan(gates[i], limit);
  silu_of(clamped, values);
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = values[i] * greater_or_nan(lesser_or_nan(ups[i], limit), -limit) * weight;
}

/// The largest magnitude so far; NaN counts as nothing. Begin with 0. Maxima of maxima likewise, so lanes may meet in any order.
__device__ inline float largest_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }

/// Codes of two values, `low`'s in bits 0-7 and `high`'s in bits 8-15.
template <ScaleFormat format>
__device__ inline std::uint32_t codes_of_pair(const GroupScale<format>& scale, float low, float high) {
  return ptx::to_e4m3_pair(scale.quotient(low), scale.quotient(high));
}

}  // namespace heddle
