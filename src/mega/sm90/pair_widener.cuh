// Operands of weights of two kinds: stored codes of routed experts are widened, and the shared expert's, which are operands, copied
// to where the tensor cores read all.
#pragma once

#include "experts/sm90/chunk.cuh"
#include "experts/sm90/large_widen.cuh"

namespace heddle::sm90 {

/// Stages of weights of two kinds. By a warpgroup, `thread` of it.
template <class Shape>
class PairWidener : public StageWidener<Shape> {
 public:
  using StageWidener<Shape>::StageWidener;

  /// Of the shared expert, whose chunks come in two stages each.
  __device__ void copy(const WeightPlan& plan, const Task& task) {
    const int bytes = plan.chunk_bytes(task.tile);
    const int first = first_half_bytes(plan, task.tile);
#pragma unroll 1
    for (int step = 0; step < plan.steps(); ++step) {
      this->shared_.widened.ring.wait_empty(this->to_);
      std::byte* operands = this->shared_.widened.operands[this->to_.stage];
      copy_half(operands, first);
      copy_half(operands + first, bytes - first);
      this->fill();
    }
  }

 private:
  __device__ __forceinline__ void copy_half(std::byte* to, int bytes) {
    this->shared_.weight_ring.wait_full(this->from_);
    const auto* values = reinterpret_cast<const uint4*>(this->shared_.weights[this->from_.stage]);
#pragma unroll 4
    for (int i = this->thread_; i < bytes / vector_bytes; i += warpgroup_threads) reinterpret_cast<uint4*>(to)[i] = values[i];
    this->leave();
  }
};

}  // namespace heddle::sm90
