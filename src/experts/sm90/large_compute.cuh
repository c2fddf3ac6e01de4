// What the math warpgroups do with large row blocks, where tokens come first.
#pragma once

#include "experts/sm90/call.hpp"
#include "experts/sm90/large_epilogue.cuh"
#include "experts/sm90/large_factors.cuh"
#include "experts/sm90/large_mainloop.cuh"
#include "experts/sm90/loaders.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/task_ring.cuh"

namespace heddle::sm90 {

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
    factors.arrive();
    span.turn(trace::Kind::epilogue);
    activation.run(sums, factors, turn);
  } else {
    loop.run(plan.steps(), sums);
    factors.arrive();
    span.turn(trace::Kind::epilogue);
    const ResultStore& out = call.results;
    const auto row_of = [&](int token) { return out.values + out.map.place(task, token) * out.stride; };
    LargeStore<Shape, pieces>(shared, row_of, out.second, plan, task, me).run(sums, factors);
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
