// Where a stage's weights lie in the ring: in one stage of it, in two where chunks are larger than its stages, or in a stage for
// each slab of a math warpgroup (BySlab).
#pragma once

#include "experts/sm90/shared.cuh"

namespace heddle::sm90 {

/// A shape whose weights are of a larger kind than its stages are made for: the same memory, laid out alike, and chunks in two
/// stages each.
template <class Shape, WeightKind kind_>
struct InTwoStages : Shape {
  static constexpr WeightKind kind = kind_;
  static constexpr int chunk_stages = 2;
  static_assert(slab_shape(kind).operand == Shape::operand && slab_shape(kind).step == slab_shape(Shape::kind).step);
  static_assert(!slab_shape(kind).row_scales && !is_widened(kind), "chunks are all there is, and they are operands");
  static_assert(tile_slabs / 2 * slab_shape(kind).data_bytes() + tile_slabs * slab_shape(kind).scale_bytes <=
                Shape::weight_stage_bytes);
};

template <class Shape>
constexpr bool is_in_two_stages() {
  if constexpr (requires { Shape::chunk_stages; }) return Shape::chunk_stages == 2;
  return false;
}

/// Slabs in the first of two stages; the others and all scales are in the second.
inline constexpr int slabs_of_half = tile_slabs / 2;

/// Bytes of the first half of a chunk of a tile.
HEDDLE_HOST_DEVICE constexpr int first_half_bytes(const WeightPlan& plan, int tile) {
  const int slabs = plan.slabs_of(tile);
  return plan.data_offset(slabs < slabs_of_half ? slabs : slabs_of_half);
}

/// The chunk that a math warp is at; `at` is its place in the ring.
template <class Shape>
class ChunkView {
  using Position = RingPosition<Shape::weight_stages>;

 public:
  static __device__ __forceinline__ void wait(const Shared<Shape>& shared, const Position& at) {
    shared.weight_ring.wait_full(at);
    if constexpr (is_in_two_stages<Shape>()) shared.weight_ring.wait_full(behind(at));
  }
  /// Of a slab of the tile, which has `tile_has`; `warpgroup` multiplies it.
  static __device__ __forceinline__ const std::byte* data(const Shared<Shape>& shared, const Position& at, const WeightPlan& plan,
                                                          int tile_has, int warpgroup, int slab, int part) {
    if constexpr (is_by_slab<Shape>()) {
      return shared.weights[at.stage] + plan.data_offset(warpgroup * Shape::parts + part);
    } else if constexpr (is_in_two_stages<Shape>()) {
      const bool second = slab >= slabs_of_half;
      return shared.weights[second ? behind(at).stage : at.stage] + plan.data_offset(second ? slab - slabs_of_half : slab);
    } else {
      return shared.weights[at.stage] + part * plan.chunk_bytes_of(tile_has) + plan.data_offset(slab);
    }
  }
  static __device__ __forceinline__ const std::byte* scales(const Shared<Shape>& shared, const Position& at, const WeightPlan& plan,
                                                            int tile_has, int slab, int part) {
    if constexpr (is_in_two_stages<Shape>()) {
      const int others = tile_has > slabs_of_half ? tile_has - slabs_of_half : 0;
      return shared.weights[behind(at).stage] + plan.scales_offset(others, slab);
    } else {
      return shared.weights[at.stage] + part * plan.chunk_bytes_of(tile_has) + plan.scales_offset(tile_has, slab);
    }
  }
  /// By all lanes of the warp.
  static __device__ __forceinline__ void leave(const Shared<Shape>& shared, Position& at) {
    for (int stage = 0; stage < (is_in_two_stages<Shape>() ? 2 : 1); ++stage) {
      shared.weight_ring.leave_together(at);
      at.advance();
    }
  }

 private:
  static __device__ __forceinline__ Position behind(Position at) {
    at.advance();
    return at;
  }
};

}  // namespace heddle::sm90
