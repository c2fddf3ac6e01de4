// What the math warpgroups do with large row blocks, where tokens come first.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm80.hpp>

#include "experts/sm90/call.hpp"
#include "experts/sm90/large_epilogue.cuh"
#include "experts/sm90/large_mainloop.cuh"
#include "experts/sm90/loaders.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/task_ring.cuh"

namespace heddle::sm90 {

/// Factors of a tile's weight rows, which a warpgroup brings for itself while it multiplies. Kinds without have nothing to do.
template <class Shape>
class LargeRowFactors {
 public:
  __device__ LargeRowFactors(Shared<Shape>& shared, const LargePosition& me) : shared_(shared), me_(me) {}

  __device__ void fetch(const OrderedMatrix& weights, const Task& task) const {
    if constexpr (slab_shape(Shape::kind).row_scales) {
      meet();  // nobody needs the last task's any more
      const int first = task.tile * tile_slabs * slab_rows;
      float* factors = shared_.widened.row_factors[me_.warpgroup];
      for (int row = me_.thread; row < tile_slabs * slab_rows; row += warpgroup_threads) {
        const float& from = weights.row_scales_of(task.expert)[min(first + row, weights.plan.rows - 1)];
        cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(from, factors[row]);
      }
      cute::cp_async_fence();
    }
  }

  template <int pieces>
  __device__ __forceinline__ void multiply(LargeSums<pieces>& sums) const {
    if constexpr (slab_shape(Shape::kind).row_scales) {
      cute::cp_async_wait<0>();
      meet();
      const float* factors = shared_.widened.row_factors[me_.warpgroup] + me_.first_piece * slabs_a_piece * slab_rows;
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const auto pair = *reinterpret_cast<const float2*>(factors + p * slabs_a_piece * slab_rows + 8 * j + me_.column());
#pragma unroll
          for (int v = 0; v < 4; ++v) sums.piece[p][4 * j + v] *= v % 2 == 0 ? pair.x : pair.y;
        }
      }
    }
  }

 private:
  /// Barrier 1 is that of all math threads.
  __device__ void meet() const {
    cutlass::arch::NamedBarrier::sync(warpgroup_threads, static_cast<std::uint32_t>(2 + me_.warpgroup));
  }

  Shared<Shape>& shared_;
  const LargePosition& me_;
};

template <class Shape, int pieces>
__device__ __forceinline__ void compute_large(Shared<Shape>& shared, const ProductCall& call, const OrderedMatrix& weights,
                                              const Task& task, LargeRings<Shape>& at, int& turn) {
  trace::WarpSpan span(trace::Kind::products, task, product_of(weights.plan));
  const LargePosition me(pieces == 2);
  const WeightPlan& plan = weights.plan;
  const LargeRowFactors<Shape> factors(shared, me);
  LargeSums<pieces> sums;
  factors.fetch(weights, task);
  LargeLoop<Shape, pieces> loop(shared, at, plan, me, plan.slabs_of(task.tile), call.tokens.scaling);
  if constexpr (Shape::activates) {
    LargeActivation<Shape, pieces> activation(shared, call.activated, plan, task, me);
    activation.fetch_weights();
    loop.run(plan.steps(), sums);
    factors.multiply(sums);
    span.turn(trace::Kind::epilogue);
    activation.run(sums, turn);
  } else {
    loop.run(plan.steps(), sums);
    factors.multiply(sums);
    span.turn(trace::Kind::epilogue);
    const ResultStore& out = call.results;
    const auto row_of = [&](int token) { return out.values + out.map.place(task, token) * out.stride; };
    LargeStore<Shape, pieces>(shared, row_of, out.second, plan, task, me).run(sums);
  }
}

/// A math warpgroup: every task of this CTA.
template <class Shape>
requires Shape::tokens_first __device__ __forceinline__ void compute(Shared<Shape>& shared, TaskRing& tasks,
                                                                     const ProductCall& call, const OrderedMatrix& weights) {
  LargeRings<Shape> at;
  LargeTurns<Shape>::begin(ptx::uniform(static_cast<int>(threadIdx.x) / warpgroup_threads));
  int turn = 0;
  ListedTasks listed(tasks);
  Task task;
  while (listed.next(task)) {
    at.operands.settle();
    at.rows.settle();
    if (task.rows <= Shape::half_tokens) {
      compute_large<Shape, 1>(shared, call, weights, task, at, turn);
    } else {
      compute_large<Shape, 2>(shared, call, weights, task, at, turn);
    }
  }
}

}  // namespace heddle::sm90
