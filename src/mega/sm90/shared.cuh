// The shared memory of a CTA of the fused kernel: the engine's, and what its roles tell each other.
#pragma once

#include "experts/sm90/ring.cuh"
#include "experts/sm90/shared.cuh"
#include "mega/sm90/shape.hpp"
#include "signal/device_worker.cuh"

namespace heddle::sm90 {

/// A warp in a role. Rows keep their format in all of them.
using MegaWorker = DeviceWorker<RowMover::plain, RoleWarp>;

/// A task as the roles of a CTA hand it around.
struct KernelTask {
  bool last = false;  ///< no task: there are no more
  MegaSource source = MegaSource::gemm1;
  Task task;        ///< `flat`: the first row, in its ring or region
  RingPlace place;  ///< of the shared expert: which block

  __device__ bool is_gemm1() const { return source == MegaSource::gemm1 || source == MegaSource::shared_gemm1; }
  __device__ bool is_shared() const { return source == MegaSource::shared_gemm1 || source == MegaSource::shared_gemm2; }
  __device__ MegaBlock block() const { return {task.expert, task.rows, place, static_cast<std::size_t>(task.flat)}; }
};

/// How a trace notes it. The block as its ring has it: generation << 16 | place.
__device__ inline trace::TaskNote note_of(const KernelTask& task) {
  constexpr trace::Product products[] = {trace::Product::gemm1, trace::Product::gemm2, trace::Product::shared_gemm1,
                                         trace::Product::shared_gemm2};
  return {products[static_cast<int>(task.source)], task.task.expert, task.place.generation << 16 | task.place.block, task.task.tile,
          task.task.rows};
}

/// Of the dispatch warp, see pull.cuh.
struct PullMemory {
  alignas(128) std::byte slots[pull_slots][pull_slot_bytes];
  std::uint64_t loaded[pull_slots];  ///< barriers
  std::byte* to[pull_slots];
  std::uint32_t bytes[pull_slots];
};

template <class Shape>
struct MegaShared {
  Shared<Shape> engine;
  PullMemory pulled;

  // Laid down before the roles part.
  MegaKnown known;
  BegunCall begun;

  KernelTask tasks[task_slots];
  bf16* results[task_slots][Shape::most_tokens];  ///< of GEMM 2: where each row's go
  float factors[task_slots][Shape::most_tokens];  ///< of GEMM 1: each row's weight
  int finished[task_slots];                       ///< how often a math warp has stored its part of a task there
  RingBarriers<task_slots> task_ring;
  std::uint64_t counted;  ///< a barrier: rows are counted and the first of them asked for, or never will be
  int stopped;            ///< a wait gave up; what follows is only to end in order

  /// Asked by a whole warp.
  __device__ bool has_stopped() const { return ptx::uniform(*const_cast<const volatile int*>(&stopped)) != 0; }
  __device__ void stop() { *const_cast<volatile int*>(&stopped) = 1; }
  /// Behind this: [local experts, ranks] counts; [local experts] rows, ends of row blocks, ends of rows.
  __device__ std::int32_t* counts() { return reinterpret_cast<std::int32_t*>(this + 1); }
};

template <class Shape>
constexpr std::size_t mega_shared_bytes() {
  return sizeof(MegaShared<Shape>) + most_mega_counts * sizeof(std::int32_t);
}

/// The math warps of the CTA meet, at the barrier (number 1) where they meet in the engine's epilogues, too.
template <class Shape>
__device__ void meet_math() {
  cutlass::arch::NamedBarrier::sync(Shape::math_threads, 1);
}

}  // namespace heddle::sm90
