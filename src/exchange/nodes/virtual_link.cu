#include "exchange/nodes/virtual_link.hpp"
#include "signal/ptx.cuh"

namespace heddle {

namespace {

constexpr int threads = 512;

/// False where waits have to end. One thread.
__device__ bool wait_for(const Word* word, Word turn, const Word* stop) {
  for (std::uint32_t look = 1; ptx::load_acquire_gpu(word) < turn; ++look) {
    if (look % 64 == 0 && ptx::load_relaxed_system(stop) != 0) return false;
  }
  return true;
}

__global__ void __launch_bounds__(threads) swap_all(const __grid_constant__ SwapCall call) {
  const Word turn = *call.turns + 1;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < call.count; i += threads) {
    const SwapCall::Entry& entry = call.entries[i];
    entry.mine->from = entry.from;
    ptx::store_release_gpu(&entry.mine->offered, turn);
  }
  bool fine = true;
  for (int i = 0; i < call.count; ++i) {
    const SwapCall::Entry& entry = call.entries[i];
    if (thread == 0) fine = wait_for(&entry.theirs->offered, turn, call.stop);
    fine = __syncthreads_and(static_cast<int>(fine)) != 0;
    if (!fine) break;
    const auto* from = static_cast<const uint4*>(*const_cast<const void* const volatile*>(&entry.theirs->from));
    auto* to = static_cast<uint4*>(entry.to);
    for (std::size_t at = static_cast<std::size_t>(thread); at < entry.bytes / sizeof(uint4); at += threads) to[at] = from[at];
    __syncthreads();
    if (thread == 0) ptx::store_release_gpu(&entry.theirs->taken, turn);
  }
  for (int i = thread; fine && i < call.count; i += threads) fine = wait_for(&call.entries[i].mine->taken, turn, call.stop);
  __syncthreads();
  if (thread == 0) *call.turns = turn;
}

}  // namespace

cudaError_t load_swap_kernel() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(swap_all));
}

cudaError_t launch_swaps(const SwapCall& call, cudaStream_t stream) {
  swap_all<<<1, threads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace heddle
