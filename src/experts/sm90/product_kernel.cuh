// The kernel of the tile engine: a persistent CTA a SM, each with math warpgroups, perhaps one that widens, and one that loads.
#pragma once

#include <cuda_runtime_api.h>
#include <cutlass/arch/reg_reconfig.h>

#include "experts/sm90/call.hpp"
#include "experts/sm90/compute.cuh"
#include "experts/sm90/large_compute.cuh"
#include "experts/sm90/large_widen.cuh"
#include "experts/sm90/loaders.cuh"
#include "experts/sm90/row_loaders.cuh"
#include "experts/sm90/scan.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {

/// Where the rows and the row blocks of the experts end. By one warp.
template <class Shape>
__device__ void list_tasks(Shared<Shape>& shared, const ProductCall& call) {
  int* row_end = row_ends(shared);
  int* block_end = block_ends(shared, call.experts);
  int blocks_before = 0;
  scan_rows(call.counts, call.experts, call.limits, [&](int expert, int begin, int end) {
    const int blocks = blocks_before + warp_prefix_sum(blocks_of(end - begin, Shape::most_tokens));
    if (expert < call.experts) {
      row_end[expert] = end;
      block_end[expert] = blocks;
    }
    blocks_before = __shfl_sync(0xFFFFFFFFu, blocks, warp_threads - 1);
  });
}

/// The weights, of a kind that the compiler knows: what follows from it are numbers then, not loads.
template <class Shape>
__device__ OrderedMatrix weights_of(const ProductCall& call) {
  OrderedMatrix weights = call.weights;
  weights.plan.kind = Shape::kind;
  return weights;
}

/// The loading warpgroup: a warp for weights, one for token scales, one or two for token rows. `thread` is of its 128.
template <class Shape>
__device__ __forceinline__ void load(Shared<Shape>& shared, const ProductCall& call, const OrderedMatrix& weights,
                                     const TaskList& tasks, int thread) {
  const int warp = thread / warp_threads;
  const WeightPlan& plan = weights.plan;
  const int stages = plan.steps() / Shape::parts;
  if (warp == 0) {
    WeightStream<Shape> stream(shared);
    if (thread == 0) for_tasks(tasks, [&](const Task& task) { stream.load(weights, task); });
  } else if (warp == 1) {
    if (call.tokens.scaling == TokenScales::none) return;
    ScaleLoader<Shape> loader(shared);
    Settled settled;
    for_tasks(tasks, [&](const Task& task) { loader.load(call.tokens, plan.cols, task, stages, settled); });
  } else if (call.tokens.in_boxes()) {
    RowBoxes<Shape> boxes(shared);
    if (thread == 2 * warp_threads) {
      for_tasks(tasks, [&](const Task& task) {
        const auto first = static_cast<std::int32_t>(call.tokens.map.place(task, 0));
        for (int stage = 0; stage < stages; ++stage) boxes.copy(call.tokens.tensor, first, task.rows, stage);
      });
    }
  } else {
    const int row_bytes = plan.cols * (Shape::operand == Operand::e4m3 ? 1 : 2);
    RowGatherer<Shape> loader(shared, call.tokens, row_bytes, thread - 2 * warp_threads);
    for_tasks(tasks, [&](const Task& task) { loader.load(task, stages); });
    loader.finish();
  }
}

/// By one thread, before anybody uses a ring. row_loaders: arrivals that make a stage of rows full, scales included.
template <class Shape>
__device__ void create_rings(Shared<Shape>& shared, int row_loaders) {
  shared.row_ring.create(row_loaders, Shape::math_warps);
  if constexpr (Shape::widening_threads > 0) {
    constexpr int widening_warps = Shape::widening_threads / warp_threads;
    shared.weight_ring.create(1, widening_warps);
    shared.widened.ring.create(widening_warps, Shape::math_warps);
  } else {
    shared.weight_ring.create(1, Shape::math_warps);
  }
  cutlass::arch::fence_barrier_init();
}

/// Whether the roles' registers are no more than what the launch gives to all threads.
template <class Shape>
constexpr bool fits_registers() {
  constexpr int of_a_thread = 64 * 1024 / Shape::threads / 8 * 8;
  int wanted = Shape::math_threads * Shape::math_registers + warpgroup_threads * Shape::loader_registers;
  if constexpr (Shape::widening_threads > 0) wanted += Shape::widening_threads * Shape::widening_registers;
  return wanted <= Shape::threads * of_a_thread;
}

/// Launched with Shape::threads threads and shared_bytes<Shape>(experts) bytes of dynamic shared memory, a CTA a SM.
template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) product_kernel(const __grid_constant__ ProductCall call) {
  extern __shared__ __align__(1024) std::byte memory[];  // aligned by its declaration: arithmetic would make generic loads of all
  static_assert(alignof(Shared<Shape>) <= 1024);
  static_assert(fits_registers<Shape>(), "roles that ask for more registers than the launch has wait for them for ever");
  auto& shared = *reinterpret_cast<Shared<Shape>*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread / warp_threads == 0) list_tasks(shared, call);
  constexpr int scale_arrivals = decltype(shared.row_ring)::arrivals_of_warp;
  const int row_loaders =
      (call.tokens.in_boxes() ? 1 : row_gatherer_threads) + (call.tokens.scaling == TokenScales::none ? 0 : scale_arrivals);
  if (thread == warp_threads) create_rings(shared, row_loaders);
  __syncthreads();
  const TaskList tasks{row_ends(shared), block_ends(shared, call.experts), call.experts, call.weights.plan.tiles(),
                       Shape::block_unit};
  const OrderedMatrix weights = weights_of<Shape>(call);
  constexpr int loading = Shape::math_threads + Shape::widening_threads;
  if (thread < Shape::math_threads) {
    cutlass::arch::warpgroup_reg_alloc<Shape::math_registers>();
    compute(shared, call, weights, tasks);
  } else if (thread >= loading) {
    cutlass::arch::warpgroup_reg_dealloc<Shape::loader_registers>();
    load(shared, call, weights, tasks, thread - loading);
  } else if constexpr (Shape::widening_threads > 0) {
    cutlass::arch::warpgroup_reg_dealloc<Shape::widening_registers>();
    Widener<Shape> widener(shared, thread - Shape::math_threads);
    for_tasks(tasks, [&](const Task& task) { widener.widen(weights.plan, task); });
  }
}

}  // namespace heddle::sm90
