// What the kernels of all ways share: the worker of a warp, this rank's pointers, and the check of ids
// before anything is announced.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "signal/device_worker.cuh"

namespace heddle {

/// Begins a kernel template of `plain`: the worker of this warp, and its squad's memory. Masked ranks leave at once.
#define HEDDLE_DEVICE_WORKER(w, call, new_call)                                          \
  extern __shared__ std::byte heddle_squad_memory[];                                     \
  DeviceWorker<plain> w((call).team, new_call, heddle_squad_memory, (call).squad_bytes); \
  if (!w.live(w.heap().rank)) return

/// A pointer into the first local rank's memory, moved to this CTA's rank.
template <class T>
__device__ T* of_this_rank(T* first, std::size_t stride) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(first) + blockIdx.y * stride);
}
template <class T>
__device__ T* of_this_rank(T* first, const DeviceCall& call) {
  return of_this_rank(first, call.scratch_stride);
}

__device__ inline Numbering of_this_rank(const Numbering& first, std::size_t stride) {
  return {of_this_rank(first.numbers, stride), of_this_rank(first.totals, stride), of_this_rank(first.before, stride)};
}
__device__ inline Numbering of_this_rank(const Numbering& first, const DeviceCall& call) {
  return of_this_rank(first, call.scratch_stride);
}

__device__ inline SendInput send_input(const DeviceCall& call) {
  const DeviceInput& input = call.ranks[blockIdx.y].input;
  return {*static_cast<const volatile int*>(input.tokens), call.topk, input.hidden, input.ids, input.weights};
}

__device__ inline SharedRows shared_rows(const DeviceCall& call) {
  const DeviceOutput& output = call.ranks[blockIdx.y].output;
  return {output.shared, output.shared_factors};
}

/// Too many tokens, ids outside of [-1, experts) or repeated within a token: a fault. The squad that found it leaves,
/// so that nothing is announced. Tokens are dealt over all squads, but in a cluster, which does not miss those that left.
template <bool plain>
__device__ bool check_input(DeviceWorker<plain>& w, const DeviceCall& call, const SendInput& input) {
  if (input.tokens < 0 || input.tokens > call.max_tokens) {
    if (w.index() == 0 && w.lane() == 0) {
      w.fail({WordKind::refused, -1, -1}, static_cast<std::uint64_t>(call.max_tokens), static_cast<std::uint64_t>(input.tokens));
    }
    return false;
  }
  const bool alone = ptx::cluster_ctas() == gridDim.x;
  const int first = static_cast<int>(alone ? threadIdx.x : blockIdx.x * blockDim.x + threadIdx.x);
  const int stride = static_cast<int>(alone ? blockDim.x : gridDim.x * blockDim.x);
  bool bad = false;
  for (int token = first; token < input.tokens; token += stride) {
    const std::int32_t* ids = input.ids + static_cast<std::ptrdiff_t>(token) * call.topk;
    for (int choice = 0; choice < call.topk; ++choice) {
      bool wrong = ids[choice] < -1 || ids[choice] >= call.experts;
      for (int other = 0; other < choice; ++other) wrong |= ids[choice] >= 0 && ids[choice] == ids[other];
      if (wrong)
        w.fail({WordKind::refused, -1, token}, static_cast<std::uint64_t>(call.experts),
               static_cast<std::uint64_t>(static_cast<std::int64_t>(ids[choice])));
      bad |= wrong;
    }
  }
  return __syncthreads_or(static_cast<int>(bad)) == 0;
}

}  // namespace heddle
