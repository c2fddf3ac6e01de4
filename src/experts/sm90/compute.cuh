// What the math warpgroups do where weights come first, on the M side: every task of the CTA, with the smallest tile that covers
// its rows.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/mainloop.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/task_ring.cuh"

namespace heddle::sm90 {

/// Factors of the weight rows of this warp, brought a task ahead.
template <class Shape>
class RowFactors {
 public:
  static constexpr bool there = slab_shape(Shape::kind).row_scales;

  __device__ RowFactors(Shared<Shape>& shared, const MathThread& me) : shared_(shared), me_(me) {}

  /// Starts to fetch those of a task, for the next turn.
  __device__ void fetch(const OrderedMatrix& weights, const Task& task) {
    if constexpr (there) {
      const int lane = me_.thread % warp_threads;
      if (lane < rows_a_warp) {
#pragma unroll
        for (int slab = 0; slab < Shape::slabs; ++slab) {
          const int number = min(task.tile * tile_slabs + me_.first_slab + slab, weights.plan.slabs() - 1);
          const int row = rows_a_warp * me_.warp() + lane;
          const float& from = weights.row_scales_of(task.expert)[number * slab_rows + row];
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
  const MathThread& me_;
  int turn_ = 0;
};

/// A task's sums, but for the factors that may wait until the end.
template <class Shape, int tokens>
__device__ __forceinline__ void multiply_task(Shared<Shape>& shared, const WeightPlan& plan, TokenScales scaling, const Task& task,
                                              const MathThread& me, const RowFactors<Shape>& factors, MathPosition<Shape>& at,
                                              Sums<Shape, tokens>& sums) {
  RowPair constant[Shape::slabs];
  if constexpr (weight_scale(Shape::kind) == WeightScale::constant) {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) constant[slab] = factors.of(slab);
  }
  MainLoop<Shape, tokens> loop(shared, at, plan, me.first_slab, plan.slabs_of(task.tile), scaling);
  loop.run(plan.steps() / Shape::parts, constant, sums);
}

/// Those factors: powers of two.
template <class Shape, int tokens>
__device__ __forceinline__ void scale_sums(const RowFactors<Shape>& factors, Sums<Shape, tokens>& sums) {
  constexpr WeightScale scale = weight_scale(Shape::kind);
  if constexpr (scale == WeightScale::by_step || scale == WeightScale::at_end) {
#pragma unroll
    for (int slab = 0; slab < Shape::slabs; ++slab) {
      const RowPair factor = factors.of(slab);
#pragma unroll
      for (int i = 0; i < tokens / 2; ++i) sums.slab[slab][i] *= i % 4 < 2 ? factor.low : factor.high;
    }
  }
}

/// What a math warpgroup of a product works with.
template <class Shape>
struct ProductMath {
  Shared<Shape>& shared;
  const ProductCall& call;
  const OrderedMatrix& weights;
  const MathThread& me;
  const RowFactors<Shape>& factors;
  MathPosition<Shape>& at;

  template <int tokens>
  __device__ __forceinline__ void run(const Task& task) const {
    trace::WarpSpan span(trace::Kind::products, task, product_of(weights.plan));
    const WeightPlan& plan = weights.plan;
    Sums<Shape, tokens> sums;
    multiply_task<Shape, tokens>(shared, plan, call.tokens.scaling, task, me, factors, at, sums);
    scale_sums(factors, sums);
    span.turn(trace::Kind::epilogue);
    if constexpr (Shape::activates) {
      ActivationEpilogue<Shape, tokens>(shared, call.activated, plan, task, me).run(sums);
    } else {
      store_results<Shape, tokens>(MappedRows(call.results, task, me), call.results.second, plan, task, me, sums);
    }
  }
};

template <int first, int... others, class Work, class AnyTask>
__device__ __forceinline__ void with_tile_of(TileSizes<first, others...>, int rows, const Work& work, const AnyTask& task) {
  if constexpr (sizeof...(others) > 0) {
    if (rows > first) return with_tile_of(TileSizes<others...>{}, rows, work, task);
  }
  work.template run<first>(task);
}

/// Calls work.run<tokens>(task) for the smallest tile that covers the task's rows. All of it is inlined: products must not cross a
/// call.
template <class Shape, class Work, class AnyTask>
__device__ __forceinline__ void with_tile(int rows, const Work& work, const AnyTask& task) {
  with_tile_of(typename TilesOf<Shape::most_tokens, is_plain<Shape>()>::Sizes{}, rows, work, task);
}

/// A math warpgroup: every task of this CTA.
template <class Shape>
__device__ __forceinline__ void compute(Shared<Shape>& shared, TaskRing& tasks, const ProductCall& call,
                                        const OrderedMatrix& weights) {
  if constexpr (Shape::activates) SharedScales<Shape>::begin(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{ptx::uniform(thread / warpgroup_threads) * Shape::slabs, thread % warpgroup_threads};
  RowFactors<Shape> factors(shared, me);
  MathPosition<Shape> at;
  const ProductMath<Shape> math{shared, call, weights, me, factors, at};
  ListedTasks listed(tasks);
  Task next;
  bool more = listed.next(next);
  if (more) factors.fetch(weights, next);
  while (more) {
    const Task task = next;
    at.weights.settle();
    at.rows.settle();
    factors.turn();
    more = listed.next(next);
    if (more) factors.fetch(weights, next);
    with_tile<Shape>(task.rows, math, task);
  }
}

}  // namespace heddle::sm90
