#include "experts/sm90/routed.cuh"

#include "group/cuda_driver.hpp"

namespace heddle::sm90 {

void prepare_rows_kernels();  // rows.cu

void launch_list(const ListCall& call, cudaStream_t stream) {
  if (call.experts == 0) return;
  const long long warps = (static_cast<long long>(call.tokens.most) * call.topk + warp_threads - 1) / warp_threads;
  const int used = warps < 1 ? 1 : warps < routed::most_list_warps ? static_cast<int>(warps) : routed::most_list_warps;
  void* arguments[] = {const_cast<ListCall*>(&call)};
  cuda::check(cudaLaunchKernel(reinterpret_cast<const void*>(&routed::list_pairs), dim3(static_cast<unsigned>(call.experts)),
                               dim3(static_cast<unsigned>(used * warp_threads)), arguments, 0, stream),
              "launch of the kernel that lists pairs");
}

void launch_sum(const SumCall& call, int ctas, cudaStream_t stream) {
  const long long items =
      static_cast<long long>(call.tokens.most) * ((call.columns + routed::warp_columns - 1) / routed::warp_columns);
  const long long wanted = (items + routed::sum_warps - 1) / routed::sum_warps;
  if (wanted == 0) return;
  void* arguments[] = {const_cast<SumCall*>(&call)};
  cuda::check(
      cudaLaunchKernel(reinterpret_cast<const void*>(&routed::sum_pairs),
                       dim3(static_cast<unsigned>(wanted < ctas ? wanted : ctas)), dim3(routed::sum_threads), arguments, 0, stream),
      "launch of the kernel that sums pairs");
}

void prepare_rows() {
  prepare_rows_kernels();
  for (const void* kernel :
       {reinterpret_cast<const void*>(&routed::list_pairs), reinterpret_cast<const void*>(&routed::sum_pairs)}) {
    cudaFuncAttributes attributes;
    cuda::check(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels of routed calls");
  }
}

}  // namespace heddle::sm90
