#include <algorithm>

#include "group/cuda_driver.hpp"
#include "routing/choice_kernel.cuh"
#include "routing/logits_kernel.cuh"

namespace heddle {

namespace {

using namespace router_kernel;

/// In registers for tiles of several experts and tokens a cell, with a CTA's shared memory for copies under way.
template <class Weight, class Tile>
__global__ void __launch_bounds__(Tile::threads) logits_kernel(const __grid_constant__ RouterCall call) {
  extern __shared__ __align__(128) std::byte shared[];
  ptx::let_next_kernel_launch();
  if constexpr (sizeof(Weight) == sizeof(float))
    compute_logits<Weight, Tile>(call, call.weights_f32, shared);
  else
    compute_logits<Weight, Tile>(call, call.weights_bf16, shared);
}

__global__ void __launch_bounds__(choice_threads) choice_kernel(const __grid_constant__ RouterCall call) {
  __shared__ ChoiceShared shared;
  ptx::wait_for_earlier_kernels();
  choose(call, shared);
}

struct LogitsKernel {
  const void* function;
  int experts, tokens, threads, shared_bytes;
};
template <class Weight, class Tile>
LogitsKernel kernel_of() {
  return {reinterpret_cast<const void*>(&logits_kernel<Weight, Tile>), Tile::experts, Tile::tokens, Tile::threads,
          Stages<Weight, Tile>::bytes};
}

/// From few tokens to many.
template <class Weight>
const LogitsKernel* kernels_of() {
  static const LogitsKernel all[] = {kernel_of<Weight, TileOf4>(), kernel_of<Weight, TileOf16>(), kernel_of<Weight, TileOf64>(),
                                     kernel_of<Weight, TileOfMany>()};
  return all;
}

LogitsKernel find_kernel(const RouterCall& call) {
  const int number = call.most_tokens <= 4 ? 0 : call.most_tokens <= 16 ? 1 : call.most_tokens <= 64 ? 2 : 3;
  return (call.weights_f32 != nullptr ? kernels_of<float>() : kernels_of<bf16>())[number];
}

void launch(const void* kernel, const RouterCall& call, long long ctas, int threads, int shared_bytes, bool ahead,
            cudaStream_t stream, const char* what) {
  void* arguments[] = {const_cast<RouterCall*>(&call)};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = ahead ? 1 : 0;
  cuda::check(cudaLaunchKernelExC(&config, kernel, arguments), what);
}

}  // namespace

void launch_router(const RouterCall& call, int sms, cudaStream_t stream) {
  if (call.most_tokens == 0) return;
  const LogitsKernel logits = find_kernel(call);
  const long long expert_tiles = (call.experts + logits.experts - 1) / logits.experts;
  const long long tiles = (call.most_tokens + logits.tokens - 1) / logits.tokens * expert_tiles;
  const long long most = 8LL * sms;
  launch(logits.function, call, std::min(tiles, most), logits.threads, logits.shared_bytes, false, stream,
         "launch of the kernel of a router's logits");
  launch(reinterpret_cast<const void*>(&choice_kernel), call, std::min<long long>(call.most_tokens, most), choice_threads, 0, true,
         stream, "launch of the kernel of a router's choices");
}

void prepare_router_kernels() {
  for (const LogitsKernel* kernels : {kernels_of<float>(), kernels_of<bf16>()}) {
    for (int i = 0; i < 4; ++i) {
      cuda::check(cudaFuncSetAttribute(kernels[i].function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernels[i].shared_bytes),
                  "loading the kernels of a router");
    }
  }
  cudaFuncAttributes attributes;
  cuda::check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&choice_kernel)), "loading the kernels of a router");
}

}  // namespace heddle
