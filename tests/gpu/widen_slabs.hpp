// Widening as kernels do it, for comparison with the host's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "experts/sm90/weight_order.hpp"

namespace heddle::sm90 {

/// registers [slabs, steps, 128 threads, 16] of a matrix in device memory.
cudaError_t launch_widen(const WeightPlan& plan, const std::byte* chunks, std::uint32_t* registers);

}  // namespace heddle::sm90
