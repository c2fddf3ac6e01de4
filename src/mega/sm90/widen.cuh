// The warpgroup that makes operands, in the fused kernel.
#pragma once

#include "mega/sm90/pair_widener.cuh"
#include "mega/sm90/tasks.cuh"

namespace heddle::sm90 {

/// The tasks of the CTA. By that warpgroup.
template <class Shape>
__device__ __forceinline__ void widen_tasks(MegaShared<Shape>& shared, int thread) {
  TaskReader<Shape> tasks(shared);
  KernelTask task;
  if constexpr (has_two_kinds<Shape>) {
    PairWidener<Shape> widener(shared.engine, thread);
    while (tasks.next(task)) {
      const trace::WarpSpan span(trace::Kind::widen, task);
      if (task.is_shared()) {
        widener.copy(plan_of<Shape::shared_kind>(shared, task), task.task);
      } else {
        widener.widen(plan_of(shared, task), task.task);
      }
      tasks.leave();
    }
  } else {
    Widener<Shape> widener(shared.engine, thread);
    while (tasks.next(task)) {
      const trace::WarpSpan span(trace::Kind::widen, task);
      widener.widen(plan_of(shared, task), task.task);
      tasks.leave();
    }
  }
}

}  // namespace heddle::sm90
