#include "mega/kernel_limits.hpp"
#include "mega/sm90/kernels.hpp"

namespace heddle::sm90 {

template <WeightKind kind>
MegaKernel mega_kernel_of(RowBlocks blocks);
extern template MegaKernel mega_kernel_of<WeightKind::bf16>(RowBlocks);
extern template MegaKernel mega_kernel_of<WeightKind::fp8_block>(RowBlocks);
extern template MegaKernel mega_kernel_of<WeightKind::mxfp4>(RowBlocks);

template <WeightKind kind>
MegaKernel plain_mega_kernel_of(RowBlocks blocks);
extern template MegaKernel plain_mega_kernel_of<WeightKind::fp8_block>(RowBlocks);
extern template MegaKernel plain_mega_kernel_of<WeightKind::mxfp4>(RowBlocks);

template <WeightKind kind, WeightKind shared>
MegaKernel mega_pair_kernel_of(RowBlocks blocks);
extern template MegaKernel mega_pair_kernel_of<WeightKind::mxfp4, WeightKind::fp8_block>(RowBlocks);

MegaKernel find_mega_kernel(WeightKind kind, WeightKind shared, RowBlocks blocks, KernelCalls calls) {
  if (kind == WeightKind::mxfp4 && shared == WeightKind::fp8_block)
    return mega_pair_kernel_of<WeightKind::mxfp4, WeightKind::fp8_block>(blocks);
  if (!has_fused_kernel(kind, shared)) return {};
  if (calls == KernelCalls::plain && kind == WeightKind::fp8_block) return plain_mega_kernel_of<WeightKind::fp8_block>(blocks);
  if (calls == KernelCalls::plain && kind == WeightKind::mxfp4) return plain_mega_kernel_of<WeightKind::mxfp4>(blocks);
  switch (kind) {
    case WeightKind::bf16:
      return mega_kernel_of<WeightKind::bf16>(blocks);
    case WeightKind::fp8_block:
      return mega_kernel_of<WeightKind::fp8_block>(blocks);
    case WeightKind::mxfp4:
      return mega_kernel_of<WeightKind::mxfp4>(blocks);
    case WeightKind::nvfp4:
    case WeightKind::mxfp8:
      break;
  }
  return {};
}

}  // namespace heddle::sm90
