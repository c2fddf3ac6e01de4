// What kernels write for the host to count by (signal/tally.hpp): the first warp of a rank, a counter a lane, at the end of
// a receiving half. Nothing waits for these stores.
#pragma once

#include "exchange/cuda_call.cuh"

namespace heddle {

/// tallies[i] grows by value(i), for i < n.
template <class Value>
__device__ void tally_up(int lane, Tally* tallies, int n, Value value) {
#pragma unroll 1
  for (int i = lane; i < n; i += 32) {
    Tally* mine = tallies + i;
    Tally now;
    now.sum[0] = ptx::load_relaxed_system(&mine->sum[0]);
    now.sum[1] = ptx::load_relaxed_system(&mine->sum[1]);
    now = now.after(value(i));
    ptx::store_relaxed_system(&mine->last[0], now.last[0]);
    ptx::store_relaxed_system(&mine->last[1], now.last[1]);
    ptx::store_relaxed_system(&mine->sum[0], now.sum[0]);
    ptx::store_relaxed_system(&mine->sum[1], now.sum[1]);
  }
}

/// Does this warp write them? By what needs no register until then.
__device__ inline bool writes_tallies(const DeviceCall& call) {
  return call.team.tallies != nullptr && blockIdx.x == 0 && threadIdx.x < 32;
}

/// Nanoseconds waited since this was asked for last. All lanes of the first warp.
__device__ inline std::uint64_t take_waiting(const DeviceCall& call) {
  std::uint64_t waited = 0;
  // The lane that measured: it sees its own sums.
  if (threadIdx.x == 0) waited = ptx::exchange_relaxed_gpu(&call.team.counters[blockIdx.y].waited, 0);
  return __shfl_sync(0xFFFFFFFFu, waited, 0);
}

/// The end of a dispatch. sent(i): rows to rank i, or to expert i, as the plan says; arrived(s): rows from rank s;
/// experts(e): rows of local expert e of those that this rank has.
template <class Sent, class Arrived, class Experts>
__device__ void tally_dispatch(const DeviceCall& call, Sent sent, Arrived arrived, Experts experts) {
  if (!writes_tallies(call)) return;
  const TallyPlan& plan = call.tally_plan;
  const std::uint64_t waited = take_waiting(call);
  const int local_experts = call.placement.experts_on[call.team.heap.rank + static_cast<int>(blockIdx.y)];
  const auto value = [&](int i) -> std::uint64_t {
    if (i < 2) return i == 0 ? 1 : waited;
    if (i < plan.arrived_at()) return static_cast<std::uint64_t>(sent(i - 2));
    if (i < plan.experts_at()) return static_cast<std::uint64_t>(arrived(i - plan.arrived_at()));
    const int e = i - plan.experts_at();
    return e < local_experts ? static_cast<std::uint64_t>(experts(e)) : 0;
  };
  tally_up(static_cast<int>(threadIdx.x), call.team.tallies + blockIdx.y * plan.size(), plan.dispatch_size(), value);
}

/// Pairs by local expert, where rows arrive as routed and so nothing else counts them: told as they are listed, summed in the
/// memory of each CTA, then added to words of the rank, which nothing waits for. The combine behind it takes them from there.
class PairCount {
 public:
  /// All warps of a squad.
  template <RowMover mover>
  __device__ PairCount(DeviceWorker<mover>& w, const DeviceCall& call) {
    if (call.routed_pairs == nullptr) return;
    experts_ = call.tally_plan.experts;
    all_ = call.routed_pairs + static_cast<int>(blockIdx.y) * experts_;
    squads_ = w.squad_array(experts_);
    if (squads_ == nullptr) return;  // no room: every pair is added to the rank's
    for (int e = static_cast<int>(threadIdx.x); e < experts_; e += static_cast<int>(blockDim.x)) squads_[e] = 0;
    __syncthreads();
  }
  __device__ void operator()(std::int32_t local_id) const {
    if (all_ == nullptr || local_id < 0) return;
    if (squads_ != nullptr) {
      atomicAdd(squads_ + local_id, 1);
    } else {
      ptx::add_relaxed_gpu(all_ + local_id, 1);
    }
  }
  /// All warps of a squad, when they have listed.
  __device__ void add_up() const {
    if (squads_ == nullptr) return;
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < experts_; e += static_cast<int>(blockDim.x)) {
      if (squads_[e] != 0) ptx::add_relaxed_gpu(all_ + e, static_cast<Word>(squads_[e]));
    }
  }

 private:
  int experts_ = 0;
  Word* all_ = nullptr;             ///< [experts]; null: nobody wants to know
  std::int32_t* squads_ = nullptr;  ///< likewise, of this CTA
};

/// The end of a combine; out of line, as its kernels have no registers to spare.
__device__ __noinline__ inline void tally_combine_now(const DeviceCall& call) {
  const TallyPlan& plan = call.tally_plan;
  const std::uint64_t waited = take_waiting(call);
  Word* pairs = call.routed_pairs + static_cast<int>(blockIdx.y) * plan.experts;
  const auto value = [&](int i) -> std::uint64_t {
    if (i < 2) return i == 0 ? 1 : waited;
    return ptx::exchange_relaxed_gpu(pairs + (i - 2), 0);
  };
  tally_up(static_cast<int>(threadIdx.x), call.team.tallies + blockIdx.y * plan.size() + plan.combine_at(), plan.combine_size(),
           value);
}
__device__ inline void tally_combine(const DeviceCall& call) {
  if (writes_tallies(call)) tally_combine_now(call);
}

}  // namespace heddle
