#include "experts/sm90/launch.hpp"

#include <fmt/format.h>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::sm90 {

template <WeightKind kind>
ProductKernel kernel_of(RowBlocks blocks, bool activates);
extern template ProductKernel kernel_of<WeightKind::bf16>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::fp8_block>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::mxfp4>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::nvfp4>(RowBlocks, bool);
extern template ProductKernel kernel_of<WeightKind::mxfp8>(RowBlocks, bool);

ProductKernel find_kernel(WeightKind kind, RowBlocks blocks, bool activates) {
  switch (kind) {
    case WeightKind::bf16:
      return kernel_of<WeightKind::bf16>(blocks, activates);
    case WeightKind::fp8_block:
      return kernel_of<WeightKind::fp8_block>(blocks, activates);
    case WeightKind::mxfp4:
      return kernel_of<WeightKind::mxfp4>(blocks, activates);
    case WeightKind::nvfp4:
      return kernel_of<WeightKind::nvfp4>(blocks, activates);
    case WeightKind::mxfp8:
      return kernel_of<WeightKind::mxfp8>(blocks, activates);
  }
  throw InputError(fmt::format("unknown weight kind {}", static_cast<int>(kind)));
}

void prepare_products(WeightKind kind) {
  for (const RowBlocks blocks : {RowBlocks::small, RowBlocks::large}) {
    for (const bool activates : {false, true}) {
      const ProductKernel kernel = find_kernel(kind, blocks, activates);
      const auto most = static_cast<int>(kernel.shared_bytes_for(most_experts));
      cuda::check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
                  "cudaFuncSetAttribute for a product of the experts");
    }
  }
}

void launch_product(const ProductCall& call, RowBlocks blocks, bool activates, int ctas, cudaStream_t stream) {
  const ProductKernel kernel = find_kernel(call.weights.plan.kind, blocks, activates);
  void* arguments[] = {const_cast<ProductCall*>(&call)};
  cuda::check(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(ctas)), dim3(static_cast<unsigned>(kernel.threads)),
                               arguments, kernel.shared_bytes_for(call.experts), stream),
              "launch of a product of the experts");
}

}  // namespace heddle::sm90
