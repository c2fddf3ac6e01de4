// A router on a GPU: logits, then choices. Launches for code that is not compiled for a device; they allocate nothing and may be
// captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "heddle/formats.hpp"
#include "heddle/routing.hpp"

namespace heddle {

/// What the kernel that chooses has room for in shared memory.
inline constexpr int most_routed_experts = 1024;

struct RouterCall {
  const int* tokens = nullptr;   ///< on the device; what is beyond most_tokens is left alone
  int most_tokens = 0;           ///< of this call: the grids follow from it
  const bf16* hidden = nullptr;  ///< [tokens, hidden_size], 16-byte aligned
  int hidden_size = 0;           ///< a multiple of 64
  int experts = 0;
  const float* weights_f32 = nullptr;  ///< [experts, hidden_size], 16-byte aligned; or null, and then
  const bf16* weights_bf16 = nullptr;  ///< the same, of bf16 values
  const float* bias = nullptr;         ///< [experts], or null
  RouterOptions options;
  float* logits = nullptr;      ///< [most_tokens, experts], of this call alone
  std::int32_t* ids = nullptr;  ///< [tokens, topk]
  float* weights = nullptr;     ///< [tokens, topk]
};
/// Two kernels, the second launched ahead of the first one's end.
void launch_router(const RouterCall& call, int sms, cudaStream_t stream);

/// Loads the kernels on the current device.
void prepare_router_kernels();

}  // namespace heddle
