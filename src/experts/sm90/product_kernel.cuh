// The kernel of the tile engine: a persistent CTA a SM, each with math warpgroups and one warpgroup that loads.
#pragma once

#include <cuda_runtime_api.h>
#include <cutlass/arch/reg_reconfig.h>

#include "experts/sm90/call.hpp"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/loaders.cuh"
#include "experts/sm90/mainloop.cuh"
#include "experts/sm90/scan.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {

/// Where the rows and the row blocks of the experts end. By one warp.
template <class Shape>
__device__ void list_tasks(Shared<Shape>& shared, const ProductCall& call) {
  int* row_end = shared.row_end();
  int* block_end = shared.block_end(call.experts);
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

/// A weight row's own scale, by slab of this warpgroup.
template <class Shape>
__device__ void read_row_scales(const OrderedMatrix& weights, const Task& task, const MathThread& me,
                                RowPair (&scales)[Shape::slabs]) {
#pragma unroll
  for (int slab = 0; slab < Shape::slabs; ++slab) {
    const int number = min(task.tile * tile_slabs + me.first_slab + slab, weights.plan.slabs() - 1);
    const float* rows = weights.row_scales_of(task.expert) + number * slab_rows;
    scales[slab] = {rows[slab_row(me.thread, 0)], rows[slab_row(me.thread, 1)]};
  }
}

/// Powers of two a weight row, which were left to the end.
template <class Shape, int tokens>
__device__ void scale_sums(const OrderedMatrix& weights, const Task& task, const MathThread& me, Sums<Shape, tokens>& sums) {
  RowPair scales[Shape::slabs];
  read_row_scales<Shape>(weights, task, me, scales);
#pragma unroll
  for (int slab = 0; slab < Shape::slabs; ++slab) {
#pragma unroll
    for (int i = 0; i < tokens / 2; ++i) sums.slab[slab][i] *= i % 4 < 2 ? scales[slab].low : scales[slab].high;
  }
}

template <class Shape, int tokens>
__device__ void compute_task(Shared<Shape>& shared, const ProductCall& call, const TaskList& tasks, int index, const MathThread& me,
                             MathPosition<Shape>& at) {
  constexpr WeightScale scale = weight_scale(Shape::kind);
  const WeightPlan& plan = call.weights.plan;
  Sums<Shape, tokens> sums;
  {
    const Task task = tasks.find(index);
    RowPair constant[Shape::slabs];
    if constexpr (scale == WeightScale::constant) read_row_scales<Shape>(call.weights, task, me, constant);
    MainLoop<Shape, tokens> loop(shared, at, plan, me.first_slab, plan.slabs_of(task.tile), call.tokens.scaling);
    loop.run(plan.steps() / Shape::parts, constant, sums);
  }
  const Task task = tasks.find(index);  // once more: registers are short in the loop
  if constexpr (scale == WeightScale::by_step || scale == WeightScale::at_end)
    scale_sums<Shape, tokens>(call.weights, task, me, sums);
  if constexpr (Shape::activates) {
    ActivationEpilogue<Shape, tokens>(shared, call.activated, plan, task, me).run(sums);
  } else {
    store_results<Shape, tokens>(call.results, plan, task, me, sums);
  }
}

/// A math warpgroup: every task of this CTA with the smallest tile that covers its rows.
template <class Shape>
__device__ void compute(Shared<Shape>& shared, const ProductCall& call, const TaskList& tasks) {
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
  MathPosition<Shape> at;
  const int count = tasks.count();
  for (int index = static_cast<int>(blockIdx.x); index < count; index += static_cast<int>(gridDim.x)) {
    const int wanted = tile_tokens(tasks.find(index).rows, Shape::most_tokens);
    if constexpr (Shape::most_tokens <= 32) {
      if (wanted <= 8) {
        compute_task<Shape, 8>(shared, call, tasks, index, me, at);
      } else if (wanted <= 16) {
        compute_task<Shape, 16>(shared, call, tasks, index, me, at);
      } else {
        compute_task<Shape, 32>(shared, call, tasks, index, me, at);
      }
    } else {
      if (wanted <= 32) {
        compute_task<Shape, 32>(shared, call, tasks, index, me, at);
      } else if (wanted <= 64) {
        compute_task<Shape, 64>(shared, call, tasks, index, me, at);
      } else if (wanted <= 96 || Shape::most_tokens == 96) {
        compute_task<Shape, 96>(shared, call, tasks, index, me, at);
      } else {
        compute_task<Shape, Shape::most_tokens>(shared, call, tasks, index, me, at);
      }
    }
  }
}

/// The loading warpgroup: a warp for weights, one for token scales, two for token rows.
template <class Shape>
__device__ void load(Shared<Shape>& shared, const ProductCall& call, const TaskList& tasks) {
  const int thread = static_cast<int>(threadIdx.x) - Shape::math_threads;
  const int warp = thread / warp_threads;
  const WeightPlan& plan = call.weights.plan;
  const int stages = plan.steps() / Shape::parts;
  if (warp == 0) {
    if (thread == 0) load_weights(shared, call.weights, tasks);
  } else if (warp == 1) {
    if (call.tokens.scaling == TokenScales::none) return;
    const int group = call.tokens.scaling == TokenScales::by_32 ? 32 : 128;
    ScaleLoader<Shape> loader(shared, call.tokens, (plan.cols + group - 1) / group);
    for_tasks(tasks, [&](const Task& task) { loader.load(task, stages); });
  } else {
    const int row_bytes = plan.cols * (Shape::operand == Operand::e4m3 ? 1 : 2);
    RowLoader<Shape> loader(shared, call.tokens, row_bytes, thread - 2 * warp_threads);
    for_tasks(tasks, [&](const Task& task) { loader.load(task, stages); });
    loader.finish();
  }
}

/// Launched with Shape::threads threads and Shared<Shape>::bytes(experts) bytes of dynamic shared memory, a CTA a SM.
template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) product_kernel(const __grid_constant__ ProductCall call) {
  extern __shared__ std::byte memory[];
  constexpr auto alignment = static_cast<std::uintptr_t>(alignof(Shared<Shape>));
  auto& shared = *reinterpret_cast<Shared<Shape>*>((reinterpret_cast<std::uintptr_t>(memory) + alignment - 1) & ~(alignment - 1));
  const int warp = static_cast<int>(threadIdx.x) / warp_threads;
  if (warp == 0) list_tasks(shared, call);
  if (threadIdx.x == warp_threads) {
    const int loaders = row_loader_threads + (call.tokens.scaling == TokenScales::none ? 0 : warp_threads);
    shared.weight_ring.create(1, Shape::math_warps);
    shared.row_ring.create(loaders, Shape::math_warps);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const TaskList tasks{shared.row_end(), shared.block_end(call.experts), call.experts, call.weights.plan.tiles(),
                       Shape::most_tokens};
  if (threadIdx.x < Shape::math_threads) {
    cutlass::arch::warpgroup_reg_alloc<Shape::math_registers>();
    compute(shared, call, tasks);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Shape::loader_registers>();
    load(shared, call, tasks);
  }
}

}  // namespace heddle::sm90
