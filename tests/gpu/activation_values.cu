#include "gpu/activation_values.hpp"

#include "experts/activation/group.cuh"

namespace heddle {

namespace {

__global__ void silu_of_all_gates(SiluOfGate* results) {
  const unsigned first = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  float gates[4], values[4];
  for (unsigned i = 0; i < 4; ++i) gates[i] = float_from_bits((first + i) << 16);
  silu_of(gates, values);
  for (unsigned i = 0; i < 4; ++i) {
    const bool is_short = fabsf(gates[i]) <= largest_short_gate;
    const float quotient = is_short ? __fdiv_rn(gates[i], short_silu_divisor(gates[i])) : values[i];
    results[first + i] = {values[i], silu(gates[i]), quotient};
  }
}

}  // namespace

void launch_silu_of_all_gates(SiluOfGate* results, cudaStream_t stream) { silu_of_all_gates<<<64, 256, 0, stream>>>(results); }

}  // namespace heddle
