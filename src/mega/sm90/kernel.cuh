// The fused kernel: a CTA a SM, from announced tokens to results in their slots at home (fused-kernel article, section 3). Each
// warp has its role until no task is left.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "exchange/cuda_call.cuh"
#include "experts/sm90/product_kernel.cuh"
#include "mega/sm90/compute.cuh"
#include "mega/sm90/dispatch.cuh"
#include "mega/sm90/loaders.cuh"
#include "mega/sm90/widen.cuh"

namespace heddle::sm90 {

/// By all threads.
template <class Shape>
__device__ void take_known(MegaShared<Shape>& shared, const MegaRank& part) {
  constexpr int vectors = sizeof(MegaKnown) / sizeof(uint4);
  static_assert(sizeof(MegaKnown) % sizeof(uint4) == 0 && vectors <= Shape::threads);
  const int i = static_cast<int>(threadIdx.x);
  if (i < vectors) reinterpret_cast<uint4*>(&shared.known)[i] = __ldg(reinterpret_cast<const uint4*>(&part.known) + i);
}

/// By one thread, beside it.
template <class Shape>
__device__ void prepare_roles(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  shared.stopped = 0;
  for (int& warps : shared.finished) warps = 0;
  create_rings(shared.engine, call.scaling == TokenScales::none ? arrivals_a_warp : 2 * arrivals_a_warp);
  shared.task_ring.create(1, Shape::math_warps + Shape::widening_threads / warp_threads + 2);
  cutlass::arch::ClusterBarrier::init(&shared.counted, arrivals_a_warp);
  cutlass::arch::fence_barrier_init();
}

/// What is this CTA's own of its rank's call. By one thread, behind both.
template <class Shape>
__device__ void complete_known(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  MegaCall& mine = shared.known.call;
  const DeviceInput& input = call.ranks[blockIdx.y].input;
  mine.input = {0, call.topk, input.hidden, input.ids, input.weights};
  mine.scratch.arrived = shared.counts();
  mine.scratch.rows = mine.scratch.arrived + mine.local_experts * mine.layout.shape.ranks;
  mine.scratch.ends = mine.scratch.rows + mine.local_experts;
  mine.scratch.row_ends = mine.scratch.ends + mine.local_experts;
}

/// By the same thread. False where the call has ended already.
template <class Shape>
__device__ bool begin_call(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  shared.known.call.input.tokens = *static_cast<const volatile int*>(call.ranks[blockIdx.y].input.tokens);
  return join_call(call.team, shared.begun);
}

/// The end of the math warps: the CTA has finished its tasks.
template <class Shape>
__device__ __forceinline__ void finish_call(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  meet_math<Shape>();
  if (shared.has_stopped() || threadIdx.x >= warp_threads) return;
  MegaWorker w(call.team, shared.begun, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
  if (mega_finish(w, shared.known.call.layout) && threadIdx.x == 0) end_joined(call.team);
}

/// The loading warpgroup, a role a warp.
template <class Shape>
__device__ __forceinline__ void run_loading_warp(MegaShared<Shape>& shared, const MegaKernelCall& call, int warp) {
  constexpr trace::Role roles[] = {trace::Role::claim, trace::Role::scales, trace::Role::rows, trace::Role::dispatch};
  const trace::WarpLane lane(trace::trace_of(call.team), roles[warp], 0);
  const RoleWarp place{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const MegaWorker w(call.team, shared.begun, place);
  switch (warp) {
    case 0:
      return claim_tasks(shared, w);
    case 1:
      return load_scales(shared, w);
    case 2:
      return load_rows(shared, w, call.parts[blockIdx.y]);
    default:
      return dispatch_rows(shared, call.team, place);
  }
}

/// Launched with Shape::threads threads and mega_shared_bytes<Shape>() bytes of dynamic shared memory, a CTA a SM, all resident.
template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) mega_kernel(const __grid_constant__ MegaKernelCall call) {
  extern __shared__ __align__(1024) std::byte memory[];
  static_assert(fits_registers<Shape>());
  static_assert(trace::fits_cells(Shape::threads));
  static_assert(mega_shared_bytes<Shape>() <= most_shared_bytes, "a CTA's shared memory");
  auto& shared = *reinterpret_cast<MegaShared<Shape>*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  take_known(shared, call.parts[blockIdx.y]);  // this far nothing hangs on the launches before
  if (thread == 0) prepare_roles(shared, call);
  __syncthreads();
  if (thread == 0) complete_known(shared, call);
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
  bool there = true;
  if (thread == 0) there = begin_call(shared, call);
  if (__syncthreads_and(static_cast<int>(there)) == 0) return;
  constexpr int loading = Shape::math_threads + Shape::widening_threads;
  if (thread < Shape::math_threads) {
    cutlass::arch::warpgroup_reg_alloc<Shape::math_registers>();
    const trace::WarpLane lane(trace::trace_of(call.team), trace::Role::math, thread / warpgroup_threads,
                               thread % warpgroup_threads < warp_threads);
    compute_tasks(shared, call);
    finish_call(shared, call);
  } else if (thread >= loading) {
    cutlass::arch::warpgroup_reg_dealloc<Shape::loader_registers>();
    run_loading_warp(shared, call, (thread - loading) / warp_threads);
  } else if constexpr (Shape::widening_threads > 0) {
    cutlass::arch::warpgroup_reg_dealloc<Shape::widening_registers>();
    const trace::WarpLane lane(trace::trace_of(call.team), trace::Role::widen, 0, thread < Shape::math_threads + warp_threads);
    widen_tasks(shared, thread - Shape::math_threads);
  }
}

}  // namespace heddle::sm90
