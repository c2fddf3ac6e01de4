#include "experts/sm90/kernels.cuh"

namespace heddle::sm90 {
template ProductKernel plain_kernel_of<WeightKind::mxfp4>(RowBlocks, bool);
}  // namespace heddle::sm90
