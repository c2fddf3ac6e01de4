// Who takes tasks, and how the other roles of the CTA hear of them.
#pragma once

#include "mega/sm90/shared.cuh"

namespace heddle::sm90 {

/// A warp that reads tasks in their order. What it reads is the same in all lanes, and the compiler knows.
template <class Shape>
class TaskReader {
 public:
  __device__ explicit TaskReader(MegaShared<Shape>& shared) : shared_(shared) {}

  /// The next one; false where there are no more.
  __device__ bool next(KernelTask& task) {
    await_task();
    const KernelTask& found = shared_.tasks[at_.stage];
    task.last = ptx::uniform(found.last) != 0;
    task.source = static_cast<MegaSource>(ptx::uniform(static_cast<int>(found.source)));
    task.task = {ptx::uniform(found.task.expert), ptx::uniform(found.task.tile), 0, ptx::uniform(found.task.rows),
                 ptx::uniform(found.task.flat)};
    task.place = {ptx::uniform(found.place.block), ptx::uniform(found.place.generation)};
    slot_ = at_.stage;
    return !task.last;
  }
  /// Where the task lies that was read last: until it is left.
  __device__ int slot() const { return slot_; }
  __device__ void leave() {
    shared_.task_ring.leave_together(at_);
    at_.advance();
  }

 private:
  __device__ void await_task() const {
    const trace::WarpSpan waiting(trace::Kind::next_task);
    shared_.task_ring.wait_full(at_);
  }

  MegaShared<Shape>& shared_;
  RingPosition<task_slots> at_;
  int slot_ = 0;
};

/// The plan of a task's weights, of a kind that the caller knows, likewise.
template <WeightKind kind, class Shape>
__device__ WeightPlan plan_of(const MegaShared<Shape>& shared, const KernelTask& task) {
  const WeightPlan& found = shared.known.weights[static_cast<int>(task.source)].plan;
  return {kind, task.is_gemm1(), ptx::uniform(found.step_exponents) != 0, ptx::uniform(found.rows), ptx::uniform(found.cols)};
}

/// For those who ask only how many columns and steps there are, which two kinds of one kernel have in common.
template <class Shape>
__device__ WeightPlan plan_of(const MegaShared<Shape>& shared, const KernelTask& task) {
  return plan_of<Shape::kind>(shared, task);
}

/// Works out a task of the rank's line.
__device__ inline KernelTask routed_task(const MegaCall& call, const MegaTask& found) {
  const MegaBlock block = block_of(call, found.block);
  KernelTask task;
  task.source = found.kind == MegaTask::Kind::gemm1 ? MegaSource::gemm1 : MegaSource::gemm2;
  const MegaBlocks blocks = call.blocks();
  task.task = {block.expert,
               found.part,
               0,
               block.rows,
               static_cast<int>(block.ring_row),
               blocks.ends[block.expert] - blocks.begin(block.expert)};
  task.place = block.place;
  return task;
}

/// The shared expert's tasks are dealt over the CTAs beforehand: calls work(task) for this CTA's of one product.
template <class Work>
__device__ void for_shared_tasks(const MegaCall& call, MegaSource source, const Work& work) {
  const MegaLayout& layout = call.layout;
  if (!layout.has_shared) return;
  const int parts = source == MegaSource::shared_gemm1 ? layout.shared.steps() : layout.gemm2_tasks();
  const int blocks = parts_of(call.input.tokens, layout.block_rows);
  for (int number = static_cast<int>(blockIdx.x); number < blocks * parts; number += static_cast<int>(gridDim.x)) {
    const int block = number / parts;
    const int first = block * layout.block_rows;
    KernelTask task;
    task.source = source;
    task.task = {0, number % parts, 0, min(layout.block_rows, call.input.tokens - first), first, blocks};
    task.place = {block, 0};
    work(task);
  }
}

/// Streams a task's weights. By one thread.
template <class Shape>
__device__ void stream_weights(MegaShared<Shape>& shared, WeightStream<Shape>& stream, const KernelTask& task) {
  OrderedMatrix weights = shared.known.weights[static_cast<int>(task.source)];
  if constexpr (has_two_kinds<Shape>) {
    if (task.is_shared()) {
      weights.plan.kind = Shape::shared_kind;
      return stream.load_halves(weights, task.task);
    }
  }
  weights.plan.kind = Shape::kind;
  stream.load(weights, task.task);
}

/// Until rows are counted and the first of them asked for.
template <class Shape>
__device__ void await_counts(const MegaShared<Shape>& shared) {
  const trace::WarpWait waiting({WordKind::mega_counted, -1, -1});
  cutlass::arch::ClusterBarrier::wait(&shared.counted, 0);
}

/// The claimer, who streams each task's weights at once: a warp. The weights of a task need nothing but its claim, so they are on
/// their way while its rows are waited for. A CTA has several tasks in hand and runs them in the order of the line: the first one
/// of all that are under way is always one that somebody works on, so nobody waits for a task behind his own.
template <class Shape>
__device__ void claim_tasks(MegaShared<Shape>& shared, MegaWorker w) {
  const MegaCall& call = shared.known.call;
  EntryWriter<KernelTask, task_slots> tasks(shared.tasks, shared.task_ring);
  WeightStream<Shape> stream(shared.engine);
  const auto take = [&](const KernelTask& task) {
    if (w.lane() == 0) {
      trace::WarpSpan span(trace::Kind::claim, task);
      tasks.put(task);
      span.turn(trace::Kind::weights);
      stream_weights(shared, stream, task);
    }
    __syncwarp();
  };
  for_shared_tasks(call, MegaSource::shared_gemm1, take);
  await_counts(shared);
  if (!shared.has_stopped()) {
    for_shared_tasks(call, MegaSource::shared_gemm2, take);
    const MegaSchedule schedule = call.layout.schedule(call.blocks().count());
    int place = w.index();  // the first tasks are dealt, those behind them claimed
    while (place < schedule.tasks() && !shared.has_stopped()) {
      const Word asked = mega_ask_next(w, call.layout);
      take(routed_task(call, schedule.task(place)));
      place = w.count() + static_cast<int>(w.answer(asked));
    }
  }
  KernelTask none;
  none.last = true;
  if (w.lane() == 0) tasks.put(none);
}

}  // namespace heddle::sm90
