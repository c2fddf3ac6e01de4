// How the roles of a CTA hear of its tasks: one thread lists them, the warps of the other roles read them from a short ring. So
// only one warp searches, and what a warp reads is the same in all of its lanes in a way that the compiler knows: loops, addresses
// and descriptors that hang on it stay in uniform registers.
#pragma once

#include "experts/sm90/ring.cuh"
#include "experts/sm90/tasks.hpp"
#include "experts/sm90/tile.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

/// How a trace notes tasks, all of which are of one product: gate and up are paired. The block is told by its first row.
__device__ inline trace::Product product_of(const WeightPlan& plan) {
  return plan.paired ? trace::Product::gemm1 : trace::Product::gemm2;
}
__device__ inline trace::TaskNote note_of(const Task& task) {
  return {trace::Product::none, task.expert, task.flat, task.tile, task.rows};
}

struct TaskRing {
  static constexpr int slots = 4;
  struct Slot {
    bool last = false;  ///< no task: there are no more
    Task task;
  };

  Slot slot[slots];
  RingBarriers<slots> ring;

  /// By one thread, who puts all of them, the last one at the end.
  __device__ auto writer() { return EntryWriter<Slot, slots>(slot, ring); }
};

/// By a warp, each for itself.
class ListedTasks {
 public:
  __device__ explicit ListedTasks(TaskRing& tasks) : tasks_(tasks) {}

  /// Whether `next` would not wait.
  __device__ bool is_there() const { return ptx::uniform(tasks_.ring.is_full(at_) ? 0 : 1) == 0; }
  /// The next one; false where there are no more, and then it is not asked again.
  __device__ bool next(Task& task) {
    await_task();
    const TaskRing::Slot& slot = tasks_.slot[at_.stage];
    const bool last = ptx::uniform(static_cast<int>(slot.last)) != 0;
    task = {ptx::uniform(slot.task.expert), ptx::uniform(slot.task.tile), ptx::uniform(slot.task.first),
            ptx::uniform(slot.task.rows),   ptx::uniform(slot.task.flat), ptx::uniform(slot.task.blocks)};
    tasks_.ring.leave_together(at_);
    at_.advance();
    return !last;
  }

 private:
  __device__ void await_task() const {
    const trace::WarpSpan waiting(trace::Kind::next_task);
    tasks_.ring.wait_full(at_);
  }

  TaskRing& tasks_;
  RingPosition<TaskRing::slots> at_;
};

}  // namespace heddle::sm90
