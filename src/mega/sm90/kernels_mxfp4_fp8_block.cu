#include "mega/sm90/kernels.cuh"

namespace heddle::sm90 {
template MegaKernel mega_pair_kernel_of<WeightKind::mxfp4, WeightKind::fp8_block>(RowBlocks);
}  // namespace heddle::sm90
