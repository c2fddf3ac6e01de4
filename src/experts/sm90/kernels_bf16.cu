#include "experts/sm90/kernels.cuh"

namespace heddle::sm90 {
template ProductKernel kernel_of<WeightKind::bf16>(RowBlocks, bool);
}  // namespace heddle::sm90
