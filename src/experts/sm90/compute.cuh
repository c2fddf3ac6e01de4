// What the math warpgroups do where weights come first, on the M side: every task of the CTA, with the smallest tile that covers
// its rows.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/mainloop.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/tasks.hpp"

namespace heddle::sm90 {

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
    } else {
      compute_task<Shape, Shape::most_tokens>(shared, call, weights, task, me, factors, at);
    }
  }
}

/// A math warpgroup: every task of this CTA.
template <class Shape>
__device__ __forceinline__ void compute(Shared<Shape>& shared, const ProductCall& call, const OrderedMatrix& weights,
                                        const TaskList& tasks) {
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
  RowFactors<Shape> factors(shared, weights, me);
  MathPosition<Shape> at;
  TaskTurns turns(tasks, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  Task next;
  bool more = turns.next(next);
  if (more) factors.fetch(next);
  while (more) {
    const Task task = next;
    factors.turn();
    more = turns.next(next);
    if (more) factors.fetch(next);
    compute_with_tile(shared, call, weights, task, me, factors, at);
  }
}

}  // namespace heddle::sm90
