// The fused kernels, for code that is not compiled for a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/launch.hpp"
#include "heddle/formats.hpp"

namespace heddle::sm90 {

/// A fused kernel as the runtime wants it.
struct MegaKernel {
  const void* function = nullptr;
  int threads = 0;
  int most_tokens = 0;  ///< of a row block
  int box_rows = 0;     ///< a row block is a multiple of it, or it has no more
  std::size_t shared_bytes = 0;
};

/// For routed experts of a kind and a shared one of `shared`; without one that is the same kind. Null functions for kinds without
/// a kernel.
MegaKernel find_mega_kernel(WeightKind kind, WeightKind shared, RowBlocks blocks, KernelCalls calls);

}  // namespace heddle::sm90
