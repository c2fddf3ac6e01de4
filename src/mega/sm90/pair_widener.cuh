// Operands of weights of two kinds: stored codes of routed experts are widened, and the shared expert's, which are operands, copied
// to where the tensor cores read all.
#pragma once

#include "experts/sm90/chunk.cuh"
#include "experts/sm90/large_widen.cuh"

namespace heddle::sm90 {

/// As Widener, for weights of two kinds. By a warpgroup, `thread` of it.
template <class Shape>
class PairWidener {
 public:
  __device__ PairWidener(Shared<Shape>& shared, int thread) : shared_(shared), thread_(thread), me_(thread) {}

  /// Of a routed expert.
  __device__ void widen(const WeightPlan& plan, const Task& task) {
    const int tile_has = plan.slabs_of(task.tile);
    const bool usual = tile_has == tile_slabs && !plan.step_exponents;
#pragma unroll 1
    for (int step = 0; step < plan.steps(); ++step) {
      shared_.widened.ring.wait_empty(to_);
      shared_.weight_ring.wait_full(from_);
      make_operands<Shape>(me_, thread_, plan, tile_has, usual, shared_.weights[from_.stage], shared_.widened.operands[to_.stage]);
      leave_stage();
      publish();
    }
  }
  /// Of the shared expert, whose chunks come in two stages each.
  __device__ void copy(const WeightPlan& plan, const Task& task) {
    const int bytes = plan.chunk_bytes(task.tile);
    const int first = first_half_bytes(plan, task.tile);
#pragma unroll 1
    for (int step = 0; step < plan.steps(); ++step) {
      shared_.widened.ring.wait_empty(to_);
      std::byte* operands = shared_.widened.operands[to_.stage];
      copy_half(operands, first);
      copy_half(operands + first, bytes - first);
      publish();
    }
  }

 private:
  __device__ __forceinline__ void copy_half(std::byte* to, int bytes) {
    shared_.weight_ring.wait_full(from_);
    const auto* values = reinterpret_cast<const uint4*>(shared_.weights[from_.stage]);
#pragma unroll 4
    for (int i = thread_; i < bytes / vector_bytes; i += warpgroup_threads) reinterpret_cast<uint4*>(to)[i] = values[i];
    leave_stage();
  }
  /// All lanes have read the stage.
  __device__ __forceinline__ void leave_stage() {
    shared_.weight_ring.leave_together(from_);
    from_.advance();
  }
  __device__ __forceinline__ void publish() {
    cutlass::arch::fence_view_async_shared();  // the tensor cores read by another proxy
    shared_.widened.ring.filled_together(to_);
    to_.advance();
  }

  Shared<Shape>& shared_;
  int thread_;
  WideningThread me_;
  RingPosition<Shape::weight_stages> from_;
  RingPosition<Shape::operand_stages> to_;
};

}  // namespace heddle::sm90
