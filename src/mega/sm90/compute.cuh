// The math warpgroups: products by the tile engine, and what becomes of their sums.
#pragma once

#include <type_traits>

#include "experts/sm90/compute.cuh"
#include "experts/sm90/large_compute.cuh"
#include "mega/sm90/large_wire.cuh"
#include "mega/sm90/tasks.cuh"

namespace heddle::sm90 {

/// Where GEMM 2 leaves the rows of a task: in the slots of their pairs at home, or of the shared expert.
template <class Shape>
class SlotRows {
 public:
  __device__ SlotRows(const MegaShared<Shape>& shared, int slot) : rows_(shared.results[slot]) {}
  __device__ bf16* operator()(int token) const { return rows_[token]; }
  /// As store_results asks.
  __device__ bf16* of(int, int token, bool real) const { return real ? rows_[token] : nullptr; }

 private:
  bf16* const* rows_;
};

/// What becomes of results at home: they are stored in slots, or added to their token's sum. A shared expert's are always stored.
struct PutResults {
  bool adds;

  __device__ void pair(bf16* to, std::uint32_t values) const {
    if (adds) {
      ptx::add_bf16_pair_system(to, values);
    } else {
      StoreResults().pair(to, values);
    }
  }
  __device__ void eight(bf16* to, const uint4& values) const {
    if (adds) {
      ptx::add_bf16_eight_system(to, values);
    } else {
      StoreResults().eight(to, values);
    }
  }
};

/// Where GEMM 1 leaves activations. Rows' weights lie in the task's slot, by their number in the task.
template <class Shape>
__device__ ActivatedStore store_of(const MegaShared<Shape>& shared, const KernelTask& task, int slot) {
  ActivatedStore store = shared.known.activated[task.is_shared() ? 1 : 0];
  store.weights = task.is_shared() ? nullptr : shared.factors[slot];
  store.map.kind = RowMap::Kind::blocks;
  store.map.block_rows = 0;
  store.map.rows = nullptr;
  return store;
}

/// Whether this math warp is the last one to finish the task in `slot`: then all stores of the others come before what it tells.
/// Nobody waits for it, as everybody would at a barrier.
template <class Shape>
__device__ __forceinline__ bool is_last_to_finish(MegaShared<Shape>& shared, int slot) {
  static_assert((Shape::math_warps & (Shape::math_warps - 1)) == 0, "counts go on from task to task, and may wrap");
  __syncwarp();
  const bool speaks = threadIdx.x % warp_threads == 0;
  const int before = ptx::add_acq_rel_cta(ptx::shared_address(&shared.finished[slot]), 1, speaks);
  // A vote: the compiler knows its result to be a whole warp's, and keeps the loops around uniform.
  return __any_sync(0xFFFFFFFFu, speaks && (before & (Shape::math_warps - 1)) == Shape::math_warps - 1) != 0;
}

/// By a math warp: its part of the task's results is stored. The last one tells those who wait for them; the unit that copies
/// tensors has its fence where it reads. Every branch here is one that the compiler knows to be a whole warp's: else the loops
/// around keep nothing uniform.
template <class Shape>
__device__ __forceinline__ void note_done(MegaShared<Shape>& shared, const DeviceTeam& team, const KernelTask& task, int slot) {
  if (!is_last_to_finish(shared, slot) || shared.has_stopped()) return;
  DeviceWorker<RowMover::plain, MathWarp> w(team, shared.begun, {});
  const MegaLayout& layout = shared.known.call.layout;
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

/// The engine's memory as tasks of the shape `Engine` have it: the kernel's own, or SharedTaskShape of it.
template <class Engine, class Shape>
__device__ __forceinline__ Shared<Engine>& engine_of(MegaShared<Shape>& shared) {
  static_assert(
      sizeof(Shared<Engine>) == sizeof(Shared<Shape>) && offsetof(Shared<Engine>, row_ring) == offsetof(Shared<Shape>, row_ring),
      "laid out alike");
  return reinterpret_cast<Shared<Engine>&>(shared.engine);
}

/// Weights first: a math warpgroup's work on a task with a tile of `tokens`.
template <class Engine, class Shape>
struct MegaMath {
  MegaShared<Shape>& shared;
  const MegaKernelCall& call;
  const MathThread& me;
  RowFactors<Engine>& factors;
  MathPosition<Engine>& at;
  const TaskReader<Shape>& tasks;

  template <int tokens>
  __device__ __forceinline__ void run(const KernelTask& task) const {
    trace::WarpSpan span(trace::Kind::products, task);
    Shared<Engine>& engine = engine_of<Engine>(shared);
    OrderedMatrix weights = shared.known.weights[static_cast<int>(task.source)];
    weights.plan = plan_of<Engine::kind>(shared, task);
    factors.fetch(weights, task.task);
    Sums<Engine, tokens> sums;
    multiply_task<Engine, tokens>(engine, weights.plan, call.scaling, task.task, me, factors, at, sums);
    factors.turn();
    scale_sums(factors, sums);
    span.turn(trace::Kind::epilogue);
    if (task.is_gemm1()) {
      const ActivatedStore store = store_of(shared, task, tasks.slot());
      ActivationEpilogue<Engine, tokens>(engine, store, weights.plan, task.task, me).run(sums);
    } else {
      leave_results<tokens>(task, weights.plan, sums);
    }
  }

  template <int tokens>
  __device__ __forceinline__ void leave_results(const KernelTask& task, const WeightPlan& plan,
                                                const Sums<Engine, tokens>& sums) const {
    const bool stores = !shared.has_stopped();
    const SlotRows<Shape> rows(shared, tasks.slot());
    const bool travels = !task.is_shared();
    if constexpr (std::is_same_v<Engine, Shape> && !is_plain<Shape>()) {  // another engine is the shared expert's
      if (travels && call.layout.returned.wire != Wire::bf16) {
        WireStore<Engine, tokens>(shared.engine, call.layout.returned, plan, task.task, me, stores).run(rows, sums);
        return;
      }
    }
    if (stores) store_results<Engine, tokens>(rows, 0, plan, task.task, me, sums, PutResults{travels && call.layout.adds});
  }
};

/// A task of the shared expert whose weights are of another kind. It takes its places in the rings like any other one.
template <class Shape>
__device__ __forceinline__ void compute_shared(MegaShared<Shape>& shared, const MegaKernelCall& call, const MathThread& me,
                                               MathPosition<Shape>& at, const TaskReader<Shape>& tasks, const KernelTask& task) {
  using Engine = SharedTaskShape<Shape>;
  RowFactors<Engine> factors(engine_of<Engine>(shared), me);
  MathPosition<Engine> here{at.weights, at.rows};
  with_tile<Engine>(task.task.rows, MegaMath<Engine, Shape>{shared, call, me, factors, here, tasks}, task);
  at = {here.weights, here.rows};
}

/// All tasks of the CTA. By a math warpgroup.
template <class Shape>
__device__ __forceinline__ void compute_tasks(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  SharedScales<Shape>::begin(shared.engine);
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
  RowFactors<Shape> factors(shared.engine, me);
  MathPosition<Shape> at;
  TaskReader<Shape> tasks(shared);
  const MegaMath<Shape, Shape> math{shared, call, me, factors, at, tasks};
  KernelTask task;
  while (tasks.next(task)) {
    if constexpr (has_two_kinds<Shape>) {
      if (task.is_shared()) {
        compute_shared(shared, call, me, at, tasks, task);
      } else {
        with_tile<Shape>(task.task.rows, math, task);
      }
    } else {
      with_tile<Shape>(task.task.rows, math, task);
    }
    note_done(shared, call.team, task, tasks.slot());
    tasks.leave();
  }
}

template <class Engine, int pieces, class Shape>
__device__ __forceinline__ void compute_large(MegaShared<Shape>& shared, const MegaKernelCall& call, const KernelTask& task,
                                              int slot, LargeRings<Engine>& at, int& turn) {
  trace::WarpSpan span(trace::Kind::products, task);
  Shared<Engine>& engine = engine_of<Engine>(shared);
  const LargePosition me(pieces == 2);
  OrderedMatrix weights = shared.known.weights[static_cast<int>(task.source)];
  weights.plan = plan_of<Engine::kind>(shared, task);
  const WeightPlan& plan = weights.plan;
  const LargeRowFactors<Engine> factors(engine, me);
  LargeSums<pieces> sums;
  factors.fetch(weights, task.task);
  LargeLoop<Engine, pieces> loop(engine, at, plan, me, plan.slabs_of(task.task.tile), call.scaling);
  loop.run(plan.steps(), sums);
  factors.arrive();
  span.turn(trace::Kind::epilogue);
  if (task.is_gemm1()) {
    const ActivatedStore store = store_of(shared, task, slot);
    LargeActivation<Engine, pieces> activation(engine, store, plan, task.task, me);
    activation.fetch_weights();
    activation.run(sums, factors, turn);
  } else if (!shared.has_stopped()) {
    const SlotRows<Shape> rows(shared, slot);
    const bool travels = !task.is_shared();
    if constexpr (std::is_same_v<Engine, Shape> && !is_plain<Shape>()) {  // another engine is the shared expert's
      if (travels && call.layout.returned.wire != Wire::bf16) {
        LargeWireStore<Engine, pieces>(engine, rows, call.layout.returned, plan, task.task, me).run(sums, factors);
        return;
      }
    }
    const PutResults put{travels && call.layout.adds};
    LargeStore<Engine, pieces, PutResults>(engine, rows, 0, plan, task.task, me, put).run(sums, factors);
  }
}

template <class Engine, class Shape>
__device__ __forceinline__ void compute_large(MegaShared<Shape>& shared, const MegaKernelCall& call, const KernelTask& task,
                                              int slot, LargeRings<Engine>& at, int& turn) {
  if (task.task.rows <= Shape::half_tokens) {
    compute_large<Engine, 1>(shared, call, task, slot, at, turn);
  } else {
    compute_large<Engine, 2>(shared, call, task, slot, at, turn);
  }
}

/// Tokens first.
template <class Shape>
requires Shape::tokens_first __device__ __forceinline__ void compute_tasks(MegaShared<Shape>& shared, const MegaKernelCall& call) {
  LargeRings<Shape> at;
  LargeTurns<Shape>::begin(ptx::uniform(static_cast<int>(threadIdx.x) / warpgroup_threads));
  int turn = 0;
  TaskReader<Shape> tasks(shared);
  KernelTask task;
  while (tasks.next(task)) {
    if constexpr (has_two_kinds<Shape>) {
      if (task.is_shared()) {
        LargeRings<SharedTaskShape<Shape>> here{at.operands, at.rows};
        compute_large(shared, call, task, tasks.slot(), here, turn);
        at = {here.operands, here.rows};
      } else {
        compute_large(shared, call, task, tasks.slot(), at, turn);
      }
    } else {
      compute_large(shared, call, task, tasks.slot(), at, turn);
    }
    note_done(shared, call.team, task, tasks.slot());
    tasks.leave();
  }
}

}  // namespace heddle::sm90
