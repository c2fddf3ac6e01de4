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

/// The call of this CTA's rank.
template <class Shape>
__device__ MegaCall call_of_rank(MegaShared<Shape>& shared, const MegaKernelCall& call, int rank) {
  MegaCall mine;
  mine.layout = call.layout;
  const DeviceInput& input = call.ranks[blockIdx.y].input;
  mine.input = {0, call.topk, input.hidden, input.ids, input.weights};
  mine.placement = call.placement;
  mine.local_experts = call.placement.experts_on[rank];
  mine.scratch.arrived = shared.counts();
  mine.scratch.rows = mine.scratch.arrived + mine.local_experts * call.layout.shape.ranks;
  mine.scratch.ends = mine.scratch.rows + mine.local_experts;
  mine.scratch.row_ends = mine.scratch.ends + mine.local_experts;
  return mine;
}

/// Where tasks find token scales, and where activations go. By one thread.
template <class Shape>
__device__ void lay_down_regions(MegaShared<Shape>& shared, const MegaKernelCall& call, const HeapView& heap) {
  const MegaLayout& layout = call.layout;
  const StepRegion regions[] = {layout.intermediate(), layout.shared_intermediate()};
  for (int which = 0; which < 2; ++which) {
    const StepRegion& region = regions[which];
    ActivatedStore& store = shared.activated[which];
    store = ActivatedStore{};
    store.format = region.format.activation;
    store.quantisation = region.format.quantisation;
    store.clamp = call.clamp;
    store.values = heap.mine<std::byte>(region.values(0, 0));
    store.value_stride = region.format.row_bytes();
    store.scales = heap.mine<std::byte>(region.scales(0, 0));
    store.scale_stride = region.format.scale_row_bytes();
    TokenRows& tokens = shared.rows[2 * which];
    TokenRows& activated = shared.rows[2 * which + 1];
    tokens = activated = TokenRows{};
    tokens.scales = heap.mine<std::byte>(which == 0 ? layout.arrived(0) : layout.row(0)) + layout.wire.scale_offset();
    tokens.scale_stride = layout.wire.row_bytes();
    activated.scales = store.scales;
    activated.scale_stride = store.scale_stride;
    tokens.scaling = activated.scaling = call.scaling;
    tokens.format = activated.format = region.format.quantisation.scale;
  }
}

/// What does not hang on the launches before. By one thread.
template <class Shape>
__device__ void prepare_roles(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  HeapView heap = call.team.heap;
  heap.rank += static_cast<int>(blockIdx.y);
  shared.stopped = 0;
  lay_down_regions(shared, call, heap);
  for (int source = 0; source < mega_sources; ++source) shared.weights[source] = call.parts[blockIdx.y].weights[source];
  create_rings(shared.engine, call.scaling == TokenScales::none ? arrivals_a_warp : 2 * arrivals_a_warp);
  shared.task_ring.create(1, Shape::math_warps + Shape::widening_threads / warp_threads + 2);
  cutlass::arch::ClusterBarrier::init(&shared.counted, arrivals_a_warp);
  cutlass::arch::fence_barrier_init();
  shared.call = call_of_rank(shared, call, heap.rank);
}

/// By the same thread. False where the call has ended already.
template <class Shape>
__device__ bool begin_call(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  shared.call.input.tokens = *static_cast<const volatile int*>(call.ranks[blockIdx.y].input.tokens);
  return join_call(call.team, shared.begun);
}

/// The end of the math warps: the CTA has finished its tasks.
template <class Shape>
__device__ __forceinline__ void finish_call(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  meet_math<Shape>();
  if (shared.has_stopped() || threadIdx.x >= warp_threads) return;
  MegaWorker w(call.team, shared.begun, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
  if (mega_finish(w, shared.call.layout) && threadIdx.x == 0) end_joined(call.team);
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
  if (thread == 0) prepare_roles(shared, call);
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
