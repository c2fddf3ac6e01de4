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

template <WeightKind kind>
struct MegaAlone {
  template <RowBlocks blocks>
  using Shape = MegaShape<kind, blocks>;
  template <RowBlocks blocks>
  using PlainShape = Plain<MegaShape<kind, blocks>>;
};
template <WeightKind kind, WeightKind shared>
struct MegaPair {
  template <RowBlocks blocks>
  using Shape = MegaPairShape<kind, shared, blocks>;
};

/// The kernel of the shape Of<blocks>, whose weights are of these kinds.
template <template <RowBlocks> class Of, WeightKind... kinds>
MegaKernel mega_kernel_for(RowBlocks blocks) {
  if (blocks == RowBlocks::small) return describe_mega_kernel<Of<RowBlocks::small>>();
  if constexpr ((has_medium_blocks(kinds) && ...)) {
    if (blocks == RowBlocks::medium) return describe_mega_kernel<Of<RowBlocks::medium>>();
  }
  return describe_mega_kernel<Of<RowBlocks::large>>();
}

template <WeightKind kind, WeightKind shared>
MegaKernel mega_pair_kernel_of(RowBlocks blocks) {
  return mega_kernel_for<MegaPair<kind, shared>::template Shape, kind, shared>(blocks);
}

template <WeightKind kind>
MegaKernel plain_mega_kernel_of(RowBlocks blocks) {
  return mega_kernel_for<MegaAlone<kind>::template PlainShape, kind>(blocks);
}

template <WeightKind kind>
MegaKernel mega_kernel_of(RowBlocks blocks) {
  return mega_kernel_for<MegaAlone<kind>::template Shape, kind>(blocks);
}

}  // namespace heddle::sm90
