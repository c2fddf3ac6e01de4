// Single values of the activation step as kernels compute them, beside the rule, for every gate there is.
#pragma once

#include <cuda_runtime.h>

namespace heddle {

struct SiluOfGate {
  float shared = 0;  ///< short_silu, as every kernel has it
  float rule = 0;    ///< silu() of swiglu.hpp on this GPU
};

/// results[i]: of the gate whose bf16 bits are i; 65,536 of them.
void launch_silu_of_all_gates(SiluOfGate* results, cudaStream_t stream);

}  // namespace heddle
