// What the kernels of all ways share: the worker of a warp, this rank's pointers, and the check of ids
// before anything is announced.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "signal/device_worker.cuh"

namespace heddle {

/// Begins a kernel: the worker of this warp, and what it needs in shared memory. Masked ranks leave at once.
#define HEDDLE_DEVICE_WORKER(w, call)                                                 \
  extern __shared__ std::byte heddle_staging[];                                       \
  __shared__ int heddle_verdict;                                                      \
  DeviceWorker w((call).team, heddle_staging, (call).staging_bytes, &heddle_verdict); \
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

__device__ inline SendInput send_input(const DeviceCall& call) {
  const DeviceInput& input = call.ranks[blockIdx.y].input;
  return {*static_cast<const volatile int*>(input.tokens), call.topk, input.hidden, input.ids, input.weights};
}

__device__ inline SharedRows shared_rows(const DeviceCall& call) {
  const DeviceOutput& output = call.ranks[blockIdx.y].output;
  return {output.shared, output.shared_factors};
}

/// Too many tokens, ids outside of [-1, experts) or repeated within a token: a fault, raised before
/// anything is announced. Ends with a barrier, so nobody goes on past a bad input.
__device__ inline bool check_input(DeviceWorker& w, const DeviceCall& call, const SendInput& input) {
  if (input.tokens < 0 || input.tokens > call.max_tokens) {
    if (w.index() == 0 && w.lane() == 0) {
      w.fail({WordKind::refused, -1, -1}, static_cast<std::uint64_t>(call.max_tokens), static_cast<std::uint64_t>(input.tokens));
    }
    w.team_barrier();
    return false;
  }
  const int lanes = w.count() * DeviceWorker::lanes_of_warp;
  for (int token = w.index() * DeviceWorker::lanes_of_warp + w.lane(); token < input.tokens; token += lanes) {
    const std::int32_t* ids = input.ids + static_cast<std::ptrdiff_t>(token) * call.topk;
    for (int choice = 0; choice < call.topk; ++choice) {
      bool bad = ids[choice] < -1 || ids[choice] >= call.experts;
      for (int other = 0; other < choice; ++other) bad |= ids[choice] >= 0 && ids[choice] == ids[other];
      if (bad)
        w.fail({WordKind::refused, -1, token}, static_cast<std::uint64_t>(call.experts),
               static_cast<std::uint64_t>(static_cast<std::int64_t>(ids[choice])));
    }
  }
  __syncwarp();
  return w.team_barrier() && !w.aborted_now();
}

}  // namespace heddle
