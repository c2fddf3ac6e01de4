// The math warpgroups: products by the tile engine, and what becomes of their sums.
#pragma once

#include "experts/sm90/compute.cuh"
#include "experts/sm90/large_compute.cuh"
#include "mega/sm90/tasks.cuh"

namespace heddle::sm90 {

/// Where GEMM 2 leaves the rows of a task: in the slots of their pairs at home, or of the shared expert.
class SlotRows {
 public:
  template <class Shape>
  __device__ SlotRows(const MegaShared<Shape>& shared, const KernelTask& task)
      : heap_(shared.begun.heap),
        layout_(shared.call.layout),
        shared_(task.is_shared()),
        first_(static_cast<std::size_t>(task.task.flat)) {}

  __device__ bf16* operator()(int token) const {
    const std::size_t row = first_ + static_cast<std::size_t>(token);
    if (shared_) return heap_.mine<bf16>(layout_.shared_slot(static_cast<int>(row)));
    return slot_of(heap_, layout_, *heap_.mine<const MegaOrigin>(layout_.origin(row)), 0);
  }
  /// As store_results asks.
  __device__ bf16* of(int, int token, bool real) const { return real ? (*this)(token) : nullptr; }

 private:
  const HeapView& heap_;
  const MegaLayout& layout_;
  bool shared_;
  std::size_t first_;
};

/// All math threads: the task's results are stored; tells those who wait for them. By then nobody of the CTA stores any more.
template <class Shape>
__device__ __forceinline__ void note_done(MegaShared<Shape>& shared, const DeviceTeam& team, const KernelTask& task) {
  if (task.is_gemm1()) ptx::fence_proxies();  // the unit that copies tensors reads what threads have stored
  meet_math<Shape>();
  if (threadIdx.x >= warp_threads || shared.has_stopped()) return;
  MegaWorker w(team, shared.begun, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
  const MegaLayout& layout = shared.call.layout;
  switch (task.source) {
    case MegaSource::gemm1:
      mega_note_step(w, layout, task.block(), task.task.tile);
      break;
    case MegaSource::gemm2:
      mega_note_pushed(w, layout, task.block());
      break;
    case MegaSource::shared_gemm1:
      mega_note_shared_step(w, layout, task.place.block, task.task.tile);
      break;
    case MegaSource::shared_gemm2:
      break;
  }
  w.note_progress();
}

/// Weights first: a math warpgroup's work on a task with a tile of `tokens`.
template <class Shape>
struct MegaMath {
  MegaShared<Shape>& shared;
  const MathThread& me;
  RowFactors<Shape>& factors;
  MathPosition<Shape>& at;

  template <int tokens>
  __device__ __forceinline__ void run(const KernelTask& task) const {
    OrderedMatrix weights = shared.weights[static_cast<int>(task.source)];
    weights.plan.kind = Shape::kind;
    const TokenRows& rows = shared.rows[static_cast<int>(task.source)];
    factors.fetch(weights, task.task);
    Sums<Shape, tokens> sums;
    multiply_task<Shape, tokens>(shared.engine, weights.plan, rows.scaling, rows.format, task.task, me, factors, at, sums);
    factors.turn();
    scale_sums(factors, sums);
    if (task.is_gemm1()) {
      const ActivatedStore& store = shared.activated[task.is_shared() ? 1 : 0];
      ActivationEpilogue<Shape, tokens>(shared.engine, store, weights.plan, task.task, me).run(sums);
    } else if (!shared.has_stopped()) {
      store_results<Shape, tokens>(SlotRows(shared, task), 0, weights.plan, task.task, me, sums);
    }
  }
};

/// All tasks of the CTA. By a math warpgroup.
template <class Shape>
__device__ __forceinline__ void compute_tasks(MegaShared<Shape>& shared, const DeviceTeam& team) {
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
  RowFactors<Shape> factors(shared.engine, me);
  MathPosition<Shape> at;
  const MegaMath<Shape> math{shared, me, factors, at};
  TaskReader<Shape> tasks(shared);
  KernelTask task;
  while (tasks.next(task)) {
    with_tile<Shape>(task.task.rows, math, task);
    note_done(shared, team, task);
  }
}

template <class Shape, int pieces>
__device__ __forceinline__ void compute_large(MegaShared<Shape>& shared, const KernelTask& task, LargeRings<Shape>& at, int& turn) {
  const LargePosition me(pieces == 2);
  OrderedMatrix weights = shared.weights[static_cast<int>(task.source)];
  weights.plan.kind = Shape::kind;
  const WeightPlan& plan = weights.plan;
  const LargeRowFactors<Shape> factors(shared.engine, me);
  LargeSums<pieces> sums;
  factors.fetch(weights, task.task);
  LargeLoop<Shape, pieces> loop(shared.engine, at, plan, me, plan.slabs_of(task.task.tile),
                                shared.rows[static_cast<int>(task.source)].scaling);
  loop.run(plan.steps(), sums);
  factors.multiply(sums);
  if (task.is_gemm1()) {
    LargeActivation<Shape, pieces> activation(shared.engine, shared.activated[task.is_shared() ? 1 : 0], plan, task.task, me);
    activation.fetch_weights();
    activation.run(sums, turn);
  } else if (!shared.has_stopped()) {
    LargeStore<Shape, pieces>(shared.engine, SlotRows(shared, task), 0, plan, task.task, me).run(sums);
  }
}

/// Tokens first.
template <class Shape>
requires Shape::tokens_first __device__ __forceinline__ void compute_tasks(MegaShared<Shape>& shared, const DeviceTeam& team) {
  LargeRings<Shape> at;
  int turn = 0;
  TaskReader<Shape> tasks(shared);
  KernelTask task;
  while (tasks.next(task)) {
    if (task.task.rows <= Shape::half_tokens) {
      compute_large<Shape, 1>(shared, task, at, turn);
    } else {
      compute_large<Shape, 2>(shared, task, at, turn);
    }
    note_done(shared, team, task);
  }
}

}  // namespace heddle::sm90
