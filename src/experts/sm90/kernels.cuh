// The kernels of one weight kind, for the file that compiles them.
#pragma once

#include "experts/sm90/launch.hpp"
#include "experts/sm90/product_kernel.cuh"

namespace heddle::sm90 {

template <class Shape>
ProductKernel describe_kernel() {
  static_assert(Shared<Shape>::bytes(most_experts) <= most_shared_bytes, "a CTA's shared memory");
  return {reinterpret_cast<const void*>(&product_kernel<Shape>), Shape::threads, Shape::most_tokens, Shape::box_rows,
          Shared<Shape>::bytes(0)};
}

template <WeightKind kind>
ProductKernel kernel_of(RowBlocks blocks, bool activates) {
  constexpr int most = slab_shape(kind).operand == Operand::e4m3 ? 128 : 96;
  if (blocks == RowBlocks::small) {
    return activates ? describe_kernel<TileShape<kind, 4, 32, true>>() : describe_kernel<TileShape<kind, 4, 32, false>>();
  }
  return activates ? describe_kernel<TileShape<kind, 2, most, true>>() : describe_kernel<TileShape<kind, 2, most, false>>();
}

}  // namespace heddle::sm90
