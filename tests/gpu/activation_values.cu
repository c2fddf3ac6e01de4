#include "gpu/activation_values.hpp"

#include "experts/activation/group.cuh"
#include "experts/activation/swiglu.hpp"

namespace heddle {

namespace {

__global__ void silu_of_all_gates(SiluOfGate* results) {
  const unsigned bits = blockIdx.x * blockDim.x + threadIdx.x;
  const float gate = float_from_bits(bits << 16);
  results[bits] = {short_silu(gate), silu(gate)};
}

}  // namespace

void launch_silu_of_all_gates(SiluOfGate* results, cudaStream_t stream) { silu_of_all_gates<<<256, 256, 0, stream>>>(results); }

}  // namespace heddle
