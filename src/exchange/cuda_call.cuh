// What the kernels of all ways share: the worker of a warp, this rank's pointers, and the check of ids
// before anything is announced.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "signal/device_worker.cuh"

namespace heddle {

/// Begins a kernel template of `mover`: the worker of this warp, and its squad's memory. Masked ranks leave at once.
#define HEDDLE_DEVICE_WORKER(w, call, part)                                                              \
  ptx::wait_for_earlier_kernels();                                                                       \
  ptx::let_next_kernel_launch();                                                                         \
  extern __shared__ std::byte heddle_squad_memory[];                                                     \
  DeviceWorker<mover> w((call).team, part, heddle_squad_memory, (call).squad_bytes, (call).bulk_bytes);  \
  if (!w.live(w.heap().rank)) return;                                                                    \
  const trace::WarpLane heddle_lane(trace::trace_of((call).team), trace::Role::worker, w.squad_index()); \
  const trace::WarpSpan heddle_span(trace::Kind::move)

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

/// The rows of a batch that this rank sums where every rank has the whole batch: the live ranks' slices follow each other.
struct BatchSlice {
  int first = 0;
  int rows = 0;
};
template <RowMover mover>
__device__ BatchSlice slice_of(const DeviceWorker<mover>& w, int tokens) {
  const LiveShare live = live_share(w);
  const auto all = static_cast<std::size_t>(tokens);
  const int first = static_cast<int>(all * live.position / live.count);
  return {first, static_cast<int>(all * (live.position + 1) / live.count) - first};
}

/// Is a choice wrong, or the same as an earlier one of its token? A group of lanes holds a token's choices, one each.
__device__ inline bool is_bad_choice(std::int32_t id, int choice, int topk, int lanes_of_token, int experts) {
  bool bad = id < -1 || id >= experts;
#pragma unroll 1
  for (int distance = 1; distance < topk; ++distance) {
    const std::int32_t earlier = __shfl_up_sync(0xFFFFFFFFu, id, static_cast<unsigned>(distance), lanes_of_token);
    bad |= choice >= distance && id >= 0 && earlier == id;
  }
  return bad;
}
/// The same for more choices than a warp has lanes.
__device__ inline bool is_bad_choice_of_many(const std::int32_t* ids, int choice, int experts) {
  bool bad = ids[choice] < -1 || ids[choice] >= experts;
#pragma unroll 1
  for (int other = 0; other < choice; ++other) bad |= ids[choice] >= 0 && ids[other] == ids[choice];
  return bad;
}

/// Gives up because of what only this rank sees. One lane.
template <RowMover mover, class Place>
__device__ void refuse(DeviceWorker<mover, Place>& w, int token, int expected, int seen) {
  w.fail({WordKind::refused, -1, token}, static_cast<std::uint64_t>(expected),
         static_cast<std::uint64_t>(static_cast<std::int64_t>(seen)));
}

/// More tokens than the step has: a fault.
template <RowMover mover, class Place>
__device__ bool check_tokens(DeviceWorker<mover, Place>& w, const DeviceCall& call, const SendInput& input) {
  if (input.tokens >= 0 && input.tokens <= call.max_tokens) return true;
  if (w.index() == 0 && w.lane() == 0) refuse(w, -1, call.max_tokens, input.tokens);
  return false;
}

/// Ids outside of [-1, experts) or repeated within a token: a fault; false in the squad that finds it. Tokens are dealt over all
/// squads, a choice a lane.
template <RowMover mover, class Place>
__device__ bool check_choices(DeviceWorker<mover, Place>& w, const DeviceCall& call, const SendInput& input) {
  const int topk = call.topk;
  const int shift = topk <= 1 ? 0 : (topk > 32 ? 5 : 32 - __clz(topk - 1));
  const int lanes = 1 << shift;
  const int tokens_a_warp = 32 >> shift;
  bool fine = true;
#pragma unroll 1
  for (int first = w.index() * tokens_a_warp; first < input.tokens; first += w.count() * tokens_a_warp) {
    const int token = first + (w.lane() >> shift);
#pragma unroll 1
    for (int base = 0; base < topk; base += lanes) {
      const int choice = base + (w.lane() & (lanes - 1));
      const bool there = token < input.tokens && choice < topk;
      const std::int32_t* ids = input.ids + static_cast<std::ptrdiff_t>(token) * topk;
      const std::int32_t id = there ? ids[choice] : -1;
      bool bad = topk <= 32 ? is_bad_choice(id, choice, topk, lanes, call.experts)
                            : there && is_bad_choice_of_many(ids, choice, call.experts);
      if (bad) refuse(w, token, call.experts, id);
      fine &= !bad;
    }
  }
  return __syncthreads_and(static_cast<int>(fine)) != 0;
}

/// Both, before anything is sent. The squad that finds something leaves and says nothing, so nothing is announced in whole.
template <RowMover mover, class Place>
__device__ bool check_input(DeviceWorker<mover, Place>& w, const DeviceCall& call, const SendInput& input) {
  return check_tokens(w, call, input) && check_choices(w, call, input);
}

}  // namespace heddle
