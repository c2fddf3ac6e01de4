// The kernels of one weight kind, for the file that compiles them.
#pragma once

#include "experts/sm90/launch.hpp"
#include "experts/sm90/product_kernel.cuh"

namespace heddle::sm90 {

template <class Shape>
ProductKernel describe_kernel() {
  static_assert(shared_bytes<Shape>(most_experts) <= most_shared_bytes, "a CTA's shared memory");
  return {reinterpret_cast<const void*>(&product_kernel<Shape>), Shape::threads, Shape::most_tokens, Shape::box_rows,
          shared_bytes<Shape>(0)};
}

template <WeightKind kind, bool activates>
ProductKernel plain_kernel_for(RowBlocks blocks) {
  return blocks == RowBlocks::small ? describe_kernel<Plain<SmallBlocks<kind, activates>>>()
                                    : describe_kernel<Plain<LargeBlocks<kind, activates>>>();
}

template <WeightKind kind>
ProductKernel plain_kernel_of(RowBlocks blocks, bool activates) {
  return activates ? plain_kernel_for<kind, true>(blocks) : plain_kernel_for<kind, false>(blocks);
}

template <WeightKind kind, bool activates>
ProductKernel kernel_for(RowBlocks blocks) {
  return blocks == RowBlocks::small ? describe_kernel<SmallBlocks<kind, activates>>()
                                    : describe_kernel<LargeBlocks<kind, activates>>();
}

template <WeightKind kind>
ProductKernel kernel_of(RowBlocks blocks, bool activates) {
  return activates ? kernel_for<kind, true>(blocks) : kernel_for<kind, false>(blocks);
}

}  // namespace heddle::sm90
