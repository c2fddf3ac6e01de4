#include "mega/sm90/kernels.cuh"

namespace heddle::sm90 {
template MegaKernel plain_mega_kernel_of<WeightKind::mxfp4>(RowBlocks);
}  // namespace heddle::sm90
