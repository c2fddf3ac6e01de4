// The kernels of one weight kind, for the file that compiles them.
#pragma once

#include <type_traits>

#include "experts/sm90/launch.hpp"
#include "experts/sm90/product_kernel.cuh"

namespace heddle::sm90 {

template <class Shape>
ProductKernel describe_kernel() {
  static_assert(shared_bytes<Shape>(most_experts) <= most_shared_bytes, "a CTA's shared memory");
  return {reinterpret_cast<const void*>(&product_kernel<Shape>), Shape::threads, Shape::most_tokens, Shape::box_rows,
          shared_bytes<Shape>(0)};
}

/// The kernel of `Of<blocks' shape>`.
template <template <class> class Of, WeightKind kind, bool activates>
ProductKernel kernel_for(RowBlocks blocks) {
  if (blocks == RowBlocks::small) return describe_kernel<Of<SmallBlocks<kind, activates>>>();
  if constexpr (has_medium_blocks(kind)) {
    if (blocks == RowBlocks::medium) return describe_kernel<Of<MediumBlocks<kind, activates>>>();
  }
  return describe_kernel<Of<LargeBlocks<kind, activates>>>();
}

template <WeightKind kind>
ProductKernel plain_kernel_of(RowBlocks blocks, bool activates) {
  return activates ? kernel_for<Plain, kind, true>(blocks) : kernel_for<Plain, kind, false>(blocks);
}

template <WeightKind kind>
ProductKernel kernel_of(RowBlocks blocks, bool activates) {
  return activates ? kernel_for<std::type_identity_t, kind, true>(blocks) : kernel_for<std::type_identity_t, kind, false>(blocks);
}

}  // namespace heddle::sm90
