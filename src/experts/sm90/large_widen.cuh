// The warpgroup that makes operands of stored codes, for large row blocks: once a CTA, and while others multiply.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>

#include "experts/sm90/loaders.cuh"
#include "experts/sm90/shared.cuh"
#include "experts/sm90/widen.hpp"

namespace heddle::sm90 {

/// A slab's stored codes are two vectors a thread, each of two instructions.
inline constexpr int halves_a_slab = slab_shape(WeightKind::mxfp4).vectors;

/// The stored codes of a stage as a tile of `slabs` slabs has them; by a constant, and every offset is known.
struct StoredSlabs {
  const std::byte* chunk;
  int slabs;
  int scale_bytes;

  __device__ const std::byte* data(int slab) const { return chunk + slab * slab_shape(WeightKind::mxfp4).data_bytes(); }
  __device__ const std::byte* scales(int slab) const { return data(slabs) + slab * scale_bytes; }
};

/// A thread's part of the stored codes of a stage, and where its operands go: addresses that hold for every slab.
class WideningThread {
 public:
  __device__ explicit WideningThread(int thread) : thread_(thread) {
    const int row = thread / 32 * 16 + thread % 16;
    first_place_ = swizzled_place(row, thread % 32 / 16 * 16);
  }

  /// Stored words of half a slab.
  struct Codes {
    Vector words;
    std::uint32_t deltas;
  };
  /// Half slab number `number` of the stage.
  __device__ __forceinline__ Codes load(const StoredSlabs& stored, int number) const {
    const int slab = number / halves_a_slab;
    const int half = number % halves_a_slab;
    return {detail::load<Vector>(stored.data(slab) + half * vector_stride + thread_ * vector_bytes),
            detail::load<std::uint32_t>(stored.scales(slab) + thread_ / 4 * 8 + half * 4)};
  }

  /// Puts its operands where the tensor cores read them, rows of 128 bytes, swizzled. By a whole warp.
  __device__ __forceinline__ void store(const Codes& codes, std::byte* operands, int number) const {
    std::uint32_t a[slab_registers / halves_a_slab];
    detail::widen_mxfp4(codes.words, codes.deltas, a);
    std::byte* slab = operands + number / halves_a_slab * slab_rows * panel_bytes;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int columns = 32 * (number % halves_a_slab * 2 + j);  // on, and swizzled alike
      auto& to = *reinterpret_cast<cute::uint128_t*>(slab + (first_place_ ^ columns));
      cute::SM90_U32x4_STSM_N::copy(a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], to);
    }
  }

 private:
  int thread_;
  int first_place_;
};

/// Step exponents of a stage, behind its operands: a byte a weight row in ascending order. By all threads.
__device__ inline void order_exponents(std::byte* to, const std::byte* chunk, const WeightPlan& plan, int tile_has, int thread) {
  if (thread >= slab_rows) return;
  const int place = (thread / 16 * 8 + thread % 8) * 2 + thread % 16 / 8;
  for (int slab = 0; slab < tile_has; ++slab) {
    to[slab * slab_rows + thread] = chunk[plan.scales_offset(tile_has, slab) + plan.shape().scale_bytes + place];
  }
}

/// Makes operands of a stage's stored codes, of any tile. By a warpgroup, `thread` of it.
template <class Shape>
__device__ inline void make_operands(const WideningThread& me, int thread, const WeightPlan& plan, int tile_has,
                                     const std::byte* chunk, std::byte* operands) {
  const StoredSlabs stored{chunk, tile_has, plan.scale_bytes()};
  for (int half = 0; half < tile_has * halves_a_slab; ++half) me.store(me.load(stored, half), operands, half);
  if (plan.step_exponents) order_exponents(operands + Shape::operand_bytes, chunk, plan, tile_has, thread);
}

/// Widens the stages of tasks. By a warpgroup, `thread` of it.
template <class Shape>
class StageWidener {
 public:
  __device__ StageWidener(Shared<Shape>& shared, int thread) : shared_(shared), thread_(thread), me_(thread) {}

  __device__ void widen(const WeightPlan& plan, const Task& task) {
    const int tile_has = plan.slabs_of(task.tile);
    if (tile_has == tile_slabs && !plan.step_exponents) {
      widen_whole(plan.steps());
    } else {
      widen_any(plan, tile_has);
    }
  }

 protected:
  /// All lanes have read the stage.
  __device__ __forceinline__ void leave() {
    shared_.weight_ring.leave_together(from_);
    from_.advance();
  }
  /// They have stored its operands.
  __device__ __forceinline__ void fill() {
    cutlass::arch::fence_view_async_shared();  // the tensor cores read by another proxy
    shared_.widened.ring.filled_together(to_);
    to_.advance();
  }

  Shared<Shape>& shared_;
  int thread_;
  RingPosition<Shape::weight_stages> from_;
  RingPosition<Shape::operand_stages> to_;

 private:
  /// A whole tile without step exponents, the usual one. The next codes are always on their way, across stages too; so a stage is
  /// left only when its last codes have become operands: arriving at a barrier does not wait for loads that are under way.
  __device__ __forceinline__ void widen_whole(int stages) {
    constexpr int halves = tile_slabs * halves_a_slab;
    shared_.weight_ring.wait_full(from_);
    auto now = me_.load(stored(), 0);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      const auto read = from_;
      shared_.widened.ring.wait_empty(to_);
#pragma unroll
      for (int half = 0; half < halves; ++half) {
        auto next = now;
        if (half + 1 < halves) {
          next = me_.load(stored(), half + 1);
        } else {
          from_.advance();
          if (stage + 1 < stages) {
            shared_.weight_ring.wait_full(from_);
            next = me_.load(stored(), 0);
          }
        }
        me_.store(now, shared_.widened.operands[to_.stage], half);
        now = next;
      }
      shared_.weight_ring.leave_together(read);
      fill();
    }
  }

  __device__ void widen_any(const WeightPlan& plan, int tile_has) {
    const int stages = plan.steps();
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      shared_.weight_ring.wait_full(from_);
      shared_.widened.ring.wait_empty(to_);
      make_operands<Shape>(me_, thread_, plan, tile_has, shared_.weights[from_.stage], shared_.widened.operands[to_.stage]);
      leave();
      fill();
    }
  }

  __device__ StoredSlabs stored() const {
    return {shared_.weights[from_.stage], tile_slabs, slab_shape(WeightKind::mxfp4).scale_bytes};
  }

  WideningThread me_;
};

/// What the widening warpgroup of a kernel of these shapes does.
template <class Shape>
class Widener : public StageWidener<Shape> {
 public:
  static_assert(Shape::kind == WeightKind::mxfp4);
  using StageWidener<Shape>::StageWidener;
};

}  // namespace heddle::sm90
