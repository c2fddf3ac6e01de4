// The warpgroup that makes operands of stored codes, for large row blocks: once a CTA, and while others multiply.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>

#include "experts/sm90/loaders.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/widen.hpp"

namespace heddle::sm90 {

/// A thread's part of the stored codes of a stage, and where its operands go: addresses that hold for every slab.
class WideningThread {
 public:
  __device__ explicit WideningThread(int thread) : thread_(thread) {
    const int row = thread / 32 * 16 + thread % 16;
    first_place_ = swizzled_place(row, thread % 32 / 16 * 16);
  }

  /// Stored words of one slab.
  struct Codes {
    std::uint32_t words[8];
    detail::Words deltas;
  };
  __device__ __forceinline__ Codes load(const std::byte* data, const std::byte* scales) const {
    Codes codes;
    detail::load_words<WeightKind::mxfp4>(data, thread_, codes.words);
    codes.deltas = detail::load<detail::Words>(scales + thread_ / 4 * 8);
    return codes;
  }

  /// Puts a slab's operands where the tensor cores read them, rows of 128 bytes, swizzled. By a whole warp.
  __device__ __forceinline__ void store(const Codes& codes, std::byte* slab) const {
    std::uint32_t a[slab_registers];
    detail::widen_mxfp4(codes.words, codes.deltas, a);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      auto& to = *reinterpret_cast<cute::uint128_t*>(slab + (first_place_ ^ 32 * j));  // 32 j columns on, swizzled alike
      cute::SM90_U32x4_STSM_N::copy(a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], to);
    }
  }

 private:
  int thread_;
  int first_place_;
};

/// Widens the slabs of a stage; the codes of the next one are on their way meanwhile. `slabs` is how many a tile has where that is
/// known, and then every offset is, too.
template <int slabs>
__device__ __forceinline__ void widen_stage(const WideningThread& me, const std::byte* chunk, std::byte* operands, int tile_has,
                                            int scale_bytes) {
  constexpr int data_bytes = slab_shape(WeightKind::mxfp4).data_bytes();
  constexpr int operand_bytes = slab_rows * panel_bytes;
  const std::byte* scales = chunk + (slabs > 0 ? slabs : tile_has) * data_bytes;
  WideningThread::Codes now = me.load(chunk, scales);
#pragma unroll
  for (int slab = 0; slab < tile_slabs; ++slab) {
    if (slabs == 0 && slab >= tile_has) break;
    WideningThread::Codes next = now;
    if (slab + 1 < (slabs > 0 ? slabs : tile_has))
      next = me.load(chunk + (slab + 1) * data_bytes, scales + (slab + 1) * scale_bytes);
    me.store(now, operands + slab * operand_bytes);
    now = next;
  }
}

/// Step exponents of a stage, behind its operands: a byte a weight row in ascending order. By all threads.
__device__ inline void order_exponents(std::byte* to, const std::byte* chunk, const WeightPlan& plan, int tile_has, int thread) {
  if (thread >= slab_rows) return;
  const int place = (thread / 16 * 8 + thread % 8) * 2 + thread % 16 / 8;
  for (int slab = 0; slab < tile_has; ++slab) {
    to[slab * slab_rows + thread] = chunk[plan.scales_offset(tile_has, slab) + plan.shape().scale_bytes + place];
  }
}

/// Makes operands of a stage's stored codes. By a warpgroup, `thread` of it. `usual`: a whole tile without step exponents.
template <class Shape>
__device__ __forceinline__ void make_operands(const WideningThread& me, int thread, const WeightPlan& plan, int tile_has,
                                              bool usual, const std::byte* chunk, std::byte* operands) {
  if (usual) {
    widen_stage<tile_slabs>(me, chunk, operands, tile_slabs, plan.shape().scale_bytes);
    return;
  }
  widen_stage<0>(me, chunk, operands, tile_has, plan.scale_bytes());
  if (plan.step_exponents) order_exponents(operands + Shape::operand_bytes, chunk, plan, tile_has, thread);
}

/// Widens the stages of tasks. By a warpgroup, `thread` of it.
template <class Shape>
class Widener {
 public:
  static_assert(Shape::kind == WeightKind::mxfp4);
  __device__ Widener(Shared<Shape>& shared, int thread) : shared_(shared), thread_(thread), me_(thread) {}

  __device__ void widen(const WeightPlan& plan, const Task& task) {
    const int tile_has = plan.slabs_of(task.tile);
    const bool usual = tile_has == tile_slabs && !plan.step_exponents;
    const int stages = plan.steps();
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      shared_.weight_ring.wait_full(from_);
      shared_.widened.ring.wait_empty(to_);
      make_operands<Shape>(me_, thread_, plan, tile_has, usual, shared_.weights[from_.stage], shared_.widened.operands[to_.stage]);
      cutlass::arch::fence_view_async_shared();  // the tensor cores read by another proxy
      shared_.weight_ring.leave_together(from_);
      shared_.widened.ring.filled_together(to_);
      from_.advance();
      to_.advance();
    }
  }

 private:
  Shared<Shape>& shared_;
  int thread_;
  WideningThread me_;
  RingPosition<Shape::weight_stages> from_;
  RingPosition<Shape::operand_stages> to_;
};

}  // namespace heddle::sm90
