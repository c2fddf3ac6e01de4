#include "layer/layer_kernels.cuh"

#include <algorithm>

#include "group/cuda_driver.hpp"

namespace heddle {

namespace {

using namespace layer_kernels;

template <class Call>
void launch(void (*kernel)(const Call), const Call& call, dim3 grid, int block, cudaStream_t stream, const char* what) {
  void* arguments[] = {const_cast<Call*>(&call)};
  cuda::check(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(block)), arguments, 0, stream),
      what);
}

/// CTAs for so many items of a warp, four a SM at most.
unsigned ctas_for(long long items, int sms) {
  const long long wanted = (items + warps_a_cta - 1) / warps_a_cta;
  return static_cast<unsigned>(std::clamp(wanted, 1LL, 4LL * sms));
}

}  // namespace

void launch_widen(const WidenCall& call, int sms, cudaStream_t stream) {
  const bool fp8 = call.wire.wire == Wire::fp8;
  if (call.begins != nullptr) {
    if (call.experts == 0) return;
    const unsigned ctas_an_expert = ctas_for(call.room / call.experts, (sms + call.experts - 1) / call.experts);
    launch(fp8 ? widen_by_expert<Wire::fp8> : widen_by_expert<Wire::nvfp4>, call,
           dim3(ctas_an_expert, static_cast<unsigned>(call.experts)), threads, stream, "launch of the kernel that widens rows");
    return;
  }
  if (call.room == 0) return;
  launch(fp8 ? widen_routed<Wire::fp8> : widen_routed<Wire::nvfp4>, call, dim3(ctas_for(call.room, sms)), threads, stream,
         "launch of the kernel that widens rows");
}

void launch_runs(const RunsCall& call, cudaStream_t stream) {
  if (call.experts == 0) return;
  const auto ctas = static_cast<unsigned>((call.experts + threads - 1) / threads);
  launch(limit_runs, call, dim3(ctas), threads, stream, "launch of the kernel that limits runs");
}

void launch_gate(const GateCall& call, int sms, cudaStream_t stream) {
  if (call.most_tokens == 0) return;
  launch(gate_tokens, call, dim3(ctas_for(call.most_tokens, sms)), threads, stream,
         "launch of the kernel of the shared expert's gate");
}

void launch_numbers(const NumbersCall& call, cudaStream_t stream) {
  launch(store_numbers, call, dim3(1), NumbersCall::most, stream, "launch of the kernel that stores numbers of tokens");
}

void launch_pass(const PassCall& call, cudaStream_t stream) {
  launch(count_pass, call, dim3(1), PassCall::most_ranks, stream, "launch of the kernel that counts the tokens of a pass");
}

void prepare_layer_kernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(&widen_by_expert<Wire::fp8>),
                                 reinterpret_cast<const void*>(&widen_by_expert<Wire::nvfp4>),
                                 reinterpret_cast<const void*>(&widen_routed<Wire::fp8>),
                                 reinterpret_cast<const void*>(&widen_routed<Wire::nvfp4>),
                                 reinterpret_cast<const void*>(&gate_tokens),
                                 reinterpret_cast<const void*>(&limit_runs),
                                 reinterpret_cast<const void*>(&store_numbers),
                                 reinterpret_cast<const void*>(&count_pass)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    cuda::check(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels of a layer");
  }
}

}  // namespace heddle
