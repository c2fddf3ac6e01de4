// The kernel of the tile engine: a persistent CTA a SM, each with math warpgroups and one warpgroup that loads.
#pragma once

#include <cuda_runtime_api.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm80.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/loaders.cuh"
#include "experts/sm90/mainloop.cuh"
#include "experts/sm90/row_loaders.cuh"
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

/// The weights, of a kind that the compiler knows: what follows from it are numbers then, not loads.
template <class Shape>
__device__ OrderedMatrix weights_of(const ProductCall& call) {
  OrderedMatrix weights = call.weights;
  weights.plan.kind = Shape::kind;
  return weights;
}

/// Factors of the weight rows of this warp, brought a task ahead.
template <class Shape>
class RowFactors {
 public:
  static constexpr bool there = slab_shape(Shape::kind).row_scales;

  __device__ RowFactors(Shared<Shape>& shared, const OrderedMatrix& weights, const MathThread& me)
      : shared_(shared), weights_(weights), me_(me) {}

  /// Starts to fetch those of a task, for the next turn.
  __device__ void fetch(const Task& task) {
    if constexpr (there) {
      const int lane = me_.thread % warp_threads;
      if (lane < rows_a_warp) {
#pragma unroll
        for (int slab = 0; slab < Shape::slabs; ++slab) {
          const int number = min(task.tile * tile_slabs + me_.first_slab + slab, weights_.plan.slabs() - 1);
          const int row = rows_a_warp * me_.warp() + lane;
          const float& from = weights_.row_scales_of(task.expert)[number * slab_rows + row];
          cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(from, shared_.row_factors.of_row[turn_ ^ 1][place(slab, row)]);
        }
      }
      cute::cp_async_fence();
    }
  }
  /// Those fetched last have arrived, and count from now on.
  __device__ void turn() {
    if constexpr (there) {
      cute::cp_async_wait<0>();
      __syncwarp();
      turn_ ^= 1;
    }
  }
  __device__ RowPair of(int slab) const {
    const float* rows = shared_.row_factors.of_row[turn_];
    return {rows[place(slab, slab_row(me_.thread, 0))], rows[place(slab, slab_row(me_.thread, 1))]};
  }

 private:
  static constexpr int rows_a_warp = 16;

  __device__ int place(int slab, int row) const { return (me_.first_slab + slab) * slab_rows + row; }

  Shared<Shape>& shared_;
  const OrderedMatrix& weights_;
  const MathThread& me_;
  int turn_ = 0;
};

template <class Shape, int tokens>
__device__ __forceinline__ void compute_task(Shared<Shape>& shared, const ProductCall& call, const OrderedMatrix& weights,
                                             const Task& task, const MathThread& me, const RowFactors<Shape>& factors,
                                             MathPosition<Shape>& at) {
  constexpr WeightScale scale = weight_scale(Shape::kind);
  const WeightPlan& plan = weights.plan;
  Sums<Shape, tokens> sums;
  {
    RowPair constant[Shape::slabs];
    if constexpr (scale == WeightScale::constant) {
#pragma unroll
      for (int slab = 0; slab < Shape::slabs; ++slab) constant[slab] = factors.of(slab);
    }
    MainLoop<Shape, tokens> loop(shared, at, plan, me.first_slab, plan.slabs_of(task.tile), call.tokens.scaling,
                                 call.tokens.format);
    loop.run(plan.steps() / Shape::parts, constant, sums);
  }
  if constexpr (scale == WeightScale::by_step || scale == WeightScale::at_end) {  // powers of two, left to the end
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
      const RowPair factor = factors.of(slab);
#pragma unroll
      for (int i = 0; i < tokens / 2; ++i) sums.slab[slab][i] *= i % 4 < 2 ? factor.low : factor.high;
    }
  }
  if constexpr (Shape::activates) {
    ActivationEpilogue<Shape, tokens>(shared, call.activated, plan, task, me).run(sums);
  } else {
    store_results<Shape, tokens>(call.results, plan, task, me, sums);
  }
}

/// One task with the smallest tile that covers its rows. All of it is inlined: products must not cross a call.
template <class Shape>
__device__ __forceinline__ void compute_with_tile(Shared<Shape>& shared, const ProductCall& call, const OrderedMatrix& weights,
                                                  const Task& task, const MathThread& me, const RowFactors<Shape>& factors,
                                                  MathPosition<Shape>& at) {
  const int wanted = tile_tokens(task.rows, Shape::most_tokens);
  if constexpr (Shape::most_tokens <= 32) {
    if (wanted <= 8) {
      compute_task<Shape, 8>(shared, call, weights, task, me, factors, at);
    } else if (wanted <= 16) {
      compute_task<Shape, 16>(shared, call, weights, task, me, factors, at);
    } else {
      compute_task<Shape, 32>(shared, call, weights, task, me, factors, at);
    }
  } else {
    if (wanted <= 32) {
      compute_task<Shape, 32>(shared, call, weights, task, me, factors, at);
    } else if (wanted <= 64) {
      compute_task<Shape, 64>(shared, call, weights, task, me, factors, at);
    } else if (wanted <= 96 || Shape::most_tokens == 96) {
      compute_task<Shape, 96>(shared, call, weights, task, me, factors, at);
    } else {
      compute_task<Shape, Shape::most_tokens>(shared, call, weights, task, me, factors, at);
    }
  }
}

/// A math warpgroup: every task of this CTA.
template <class Shape>
__device__ __forceinline__ void compute(Shared<Shape>& shared, const ProductCall& call, const TaskList& tasks) {
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
  const OrderedMatrix weights = weights_of<Shape>(call);
  RowFactors<Shape> factors(shared, weights, me);
  MathPosition<Shape> at;
  const int count = tasks.count();
  const int ctas = static_cast<int>(gridDim.x);
  int index = static_cast<int>(blockIdx.x);
  if (index >= count) return;
  Task next = tasks.find(index);
  factors.fetch(next);
  for (; index < count; index += ctas) {
    const Task task = next;
    factors.turn();
    if (index + ctas < count) {
      next = tasks.find(index + ctas);
      factors.fetch(next);
    }
    compute_with_tile(shared, call, weights, task, me, factors, at);
  }
}

/// The loading warpgroup: a warp for weights, one for token scales, one or two for token rows.
template <class Shape>
__device__ __forceinline__ void load(Shared<Shape>& shared, const ProductCall& call, const TaskList& tasks) {
  const int thread = static_cast<int>(threadIdx.x) - Shape::math_threads;
  const int warp = thread / warp_threads;
  const OrderedMatrix weights = weights_of<Shape>(call);
  const WeightPlan& plan = weights.plan;
  const int stages = plan.steps() / Shape::parts;
  if (warp == 0) {
    if (thread == 0) load_weights(shared, weights, tasks);
  } else if (warp == 1) {
    if (call.tokens.scaling == TokenScales::none) return;
    ScaleLoader<Shape> loader(shared, call.tokens, plan.cols);
    for_tasks(tasks, [&](const Task& task) { loader.load(task, stages); });
  } else if (call.tokens.in_boxes()) {
    if (thread == 2 * warp_threads) copy_rows(shared, call.tokens, tasks, stages);
  } else {
    const int row_bytes = plan.cols * (Shape::operand == Operand::e4m3 ? 1 : 2);
    RowGatherer<Shape> loader(shared, call.tokens, row_bytes, thread - 2 * warp_threads);
    for_tasks(tasks, [&](const Task& task) { loader.load(task, stages); });
    loader.finish();
  }
}

/// Launched with Shape::threads threads and Shared<Shape>::bytes(experts) bytes of dynamic shared memory, a CTA a SM.
template <class Shape>
__global__ void __launch_bounds__(Shape::threads, 1) product_kernel(const __grid_constant__ ProductCall call) {
  extern __shared__ __align__(1024) std::byte memory[];  // aligned by its declaration: arithmetic would make generic loads of all
  static_assert(alignof(Shared<Shape>) <= 1024);
  auto& shared = *reinterpret_cast<Shared<Shape>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / warp_threads;
  if (warp == 0) list_tasks(shared, call);
  if (threadIdx.x == warp_threads) {
    const int loaders = (call.tokens.in_boxes() ? 1 : row_gatherer_threads) + (call.tokens.scaling == TokenScales::none ? 0 : 1);
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
