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
#include "experts/sm90/task_ring.cuh"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {

/// The shared memory of a product: the engine's, and the tasks of the CTA. Behind it lie the lists of experts.
template <class Shape>
struct ProductShared {
  Shared<Shape> engine;
  TaskRing tasks;

  /// [experts] each: where an expert's rows end, and its row blocks.
  __device__ int* row_ends() { return reinterpret_cast<int*>(this + 1); }
  __device__ int* block_ends(int experts) { return row_ends() + experts; }
};
template <class Shape>
constexpr std::size_t shared_bytes(int experts) {
  return sizeof(ProductShared<Shape>) + static_cast<std::size_t>(experts) * 2 * sizeof(int);
}

/// Where the rows and the row blocks of the experts end. By one warp.
template <class Shape>
__device__ void list_tasks(ProductShared<Shape>& shared, const ProductCall& call) {
  int* row_end = shared.row_ends();
  int* block_end = shared.block_ends(call.experts);
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

/// Lists the tasks of this CTA and streams their weights. By one thread. Tasks are told one ahead: whoever works on one may look at
/// the next before the weights of the first are through.
template <class Shape>
__device__ void stream_weights(ProductShared<Shape>& shared, const OrderedMatrix& weights, const TaskList& tasks) {
  TaskTurns turns(tasks, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  auto told = shared.tasks.writer();
  WeightStream<Shape> stream(shared.engine);
  const auto tell_next = [&](Task& task) {
    const bool more = turns.next(task);
    more ? told.put({false, task}) : told.put({true, Task{}});
    return more;
  };
  Task task;
  bool more = tell_next(task);
  while (more) {
    Task next;
    more = tell_next(next);
    {
      const trace::WarpSpan span(trace::Kind::weights, task, product_of(weights.plan));
      stream.load(weights, task);
    }
    task = next;
  }
}

/// What the kernels before have left may be read from here on. Not before, the kernel behind this one may find its place: so it
/// finds all done that was queued before this one.
__device__ __forceinline__ void begin_behind_earlier_kernels() {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_launch();
}

/// The loading warpgroup: a warp for weights, one for token scales, one or two for token rows. `thread` is of its 128.
template <class Shape>
__device__ __forceinline__ void load(ProductShared<Shape>& shared, const ProductCall& call, const OrderedMatrix& weights,
                                     const TaskList& tasks, int thread) {
  const int warp = thread / warp_threads;
  const WeightPlan& plan = weights.plan;
  const int stages = plan.steps() / Shape::parts;
  ListedTasks listed(shared.tasks);
  Task task;
  if (warp > 0 && call.start == ProductStart::ahead_with_weights) begin_behind_earlier_kernels();
  if (warp == 0) {
    if (thread == 0) stream_weights(shared, weights, tasks);
  } else if (warp == 1) {
    if (call.tokens.scaling == TokenScales::none) return;
    ScaleLoader<Shape> loader(shared.engine);
    Settled settled;
    while (listed.next(task)) loader.load(call.tokens, plan.cols, task, stages, settled);
  } else if (call.tokens.in_boxes()) {
    if (warp != 2) return;
    RowBoxes<Shape> boxes(shared.engine);
    while (listed.next(task)) {
      const auto first = static_cast<std::int32_t>(call.tokens.map.place(task, 0));
      if (thread % warp_threads == 0) {
        for (int stage = 0; stage < stages; ++stage) boxes.copy(call.tokens.tensor, first, task.rows, stage);
      }
      __syncwarp();
    }
  } else {
    const int row_bytes = plan.cols * (Shape::operand == Operand::e4m3 ? 1 : 2);
    RowGatherer<Shape> loader(shared.engine, call.tokens, row_bytes, thread - 2 * warp_threads);
    while (true) {
      if (!listed.is_there()) loader.finish();  // who lists tasks may be waiting for these rows to be multiplied
      if (!listed.next(task)) break;
      loader.load(task, stages);
    }
    loader.finish();
  }
}

/// By one thread, before anybody uses a ring. row_loaders: arrivals that make a stage of rows full, scales included.
template <class Shape>
__device__ void create_rings(Shared<Shape>& shared, int row_loaders) {
  shared.row_ring.create(row_loaders, Shape::math_warps, 1);
  if constexpr (Shape::widening_threads > 0) {
    constexpr int widening_warps = Shape::widening_threads / warp_threads;
    shared.weight_ring.create(1, widening_warps);
    shared.widened.ring.create(widening_warps * arrivals_a_warp, Shape::math_warps);
  } else {
    shared.weight_ring.create(1, Shape::math_warps);
  }
  cutlass::arch::fence_barrier_init();
}
template <class Shape>
__device__ void create_rings(ProductShared<Shape>& shared, const TokenRows& tokens) {
  const int scales = tokens.scaling == TokenScales::none ? 0 : 1;  // warps
  const int rows = tokens.in_boxes() ? 1 : row_gatherer_threads / warp_threads;
  shared.tasks.ring.create(1, Shape::math_warps + Shape::widening_threads / warp_threads + scales + rows);
  create_rings(shared.engine, (tokens.in_boxes() ? 1 : row_gatherer_threads) + scales * arrivals_a_warp);
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
  static_assert(alignof(ProductShared<Shape>) <= 1024);
  static_assert(trace::fits_cells(Shape::threads));
  static_assert(fits_registers<Shape>(), "roles that ask for more registers than the launch has wait for them for ever");
  auto& shared = *reinterpret_cast<ProductShared<Shape>*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (call.start != ProductStart::ahead_with_weights) begin_behind_earlier_kernels();
  if (thread / warp_threads == 0) list_tasks(shared, call);
  if (thread == warp_threads) create_rings(shared, call.tokens);
  __syncthreads();
  const OrderedMatrix weights = weights_of<Shape>(call);
  constexpr int loading = Shape::math_threads + Shape::widening_threads;
  if (thread < Shape::math_threads) {
    cutlass::arch::warpgroup_reg_alloc<Shape::math_registers>();
    const trace::WarpLane lane(trace::trace_of(call), trace::Role::math, thread / warpgroup_threads,
                               thread % warpgroup_threads < warp_threads);
    compute(shared.engine, shared.tasks, call, weights);
  } else if (thread >= loading) {
    cutlass::arch::warpgroup_reg_dealloc<Shape::loader_registers>();
    constexpr trace::Role roles[] = {trace::Role::claim, trace::Role::scales, trace::Role::rows, trace::Role::rows};
    const trace::WarpLane lane(trace::trace_of(call), roles[(thread - loading) / warp_threads], 0,
                               thread - loading < 3 * warp_threads);
    const TaskList tasks{shared.row_ends(), shared.block_ends(call.experts), call.experts, call.weights.plan.tiles(),
                         Shape::block_unit};
    load(shared, call, weights, tasks, thread - loading);
  } else if constexpr (Shape::widening_threads > 0) {
    cutlass::arch::warpgroup_reg_dealloc<Shape::widening_registers>();
    const trace::WarpLane lane(trace::trace_of(call), trace::Role::widen, 0, thread < Shape::math_threads + warp_threads);
    Widener<Shape> widener(shared.engine, thread - Shape::math_threads);
    ListedTasks listed(shared.tasks);
    Task task;
    while (listed.next(task)) {
      const trace::WarpSpan span(trace::Kind::widen, task, product_of(weights.plan));
      widener.widen(weights.plan, task);
    }
  }
}

}  // namespace heddle::sm90
