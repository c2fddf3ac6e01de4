#include "balancing/copies_kernel.cuh"

#include "group/cuda_driver.hpp"

namespace heddle {

void launch_copies(const CopiesCall& call, cudaStream_t stream) {
  if (call.most_tokens == 0) return;
  void* arguments[] = {const_cast<CopiesCall*>(&call)};
  cuda::check(cudaLaunchKernel(reinterpret_cast<const void*>(&copies_kernel::choose), dim3(1), dim3(copies_kernel::threads),
                               arguments, 0, stream),
              "launch of the kernel that chooses copies of experts");
}

void prepare_copies_kernel() {
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&copies_kernel::choose)),
              "loading the kernel that chooses copies of experts");
}

}  // namespace heddle
