// The fused kernels of one weight kind, for the file that compiles them.
#pragma once

#include "mega/sm90/kernel.cuh"
#include "mega/sm90/kernels.hpp"

namespace heddle::sm90 {

template <class Shape>
MegaKernel describe_mega_kernel() {
  static_assert(Shape::most_tokens >= least_cut_rows, "words have room for row blocks of so many rows");
  return {reinterpret_cast<const void*>(&mega_kernel<Shape>), Shape::threads, Shape::most_tokens, Shape::box_rows,
          mega_shared_bytes<Shape>()};
}

template <WeightKind kind, WeightKind shared>
MegaKernel mega_pair_kernel_of(RowBlocks blocks) {
  return blocks == RowBlocks::small ? describe_mega_kernel<MegaPairShape<kind, shared, RowBlocks::small>>()
                                    : describe_mega_kernel<MegaPairShape<kind, shared, RowBlocks::large>>();
}

template <WeightKind kind>
MegaKernel plain_mega_kernel_of(RowBlocks blocks) {
  return blocks == RowBlocks::small ? describe_mega_kernel<Plain<MegaShape<kind, RowBlocks::small>>>()
                                    : describe_mega_kernel<Plain<MegaShape<kind, RowBlocks::large>>>();
}

template <WeightKind kind>
MegaKernel mega_kernel_of(RowBlocks blocks) {
  return blocks == RowBlocks::small ? describe_mega_kernel<MegaShape<kind, RowBlocks::small>>()
                                    : describe_mega_kernel<MegaShape<kind, RowBlocks::large>>();
}

}  // namespace heddle::sm90
