// The shared memory of a CTA of the tile engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/large_tile.hpp"
#include "experts/sm90/ring.cuh"
#include "experts/sm90/tile.hpp"

namespace heddle::sm90 {

/// The fused activation: values on their way out, and scales as math warps tell each other of them (shared_scales.cuh).
template <class Shape, bool wanted = Shape::activates>
struct ActivationMemory {
  static constexpr int groups = is_plain<Shape>() ? 1 : tile_slabs;  ///< of a tile, at most
  alignas(16) std::byte values[Shape::most_tokens * Shape::activated_stride];
  alignas(8) std::int32_t scales[2][groups][Shape::most_tokens];
  int turn;
};
template <class Shape>
struct ActivationMemory<Shape, false> {};

/// Weight rows' own factors, of this task and of the next; each warp brings those of its rows.
template <class Shape, bool wanted = (Shape::row_factor_bytes > 0)>
struct RowFactorMemory {
  float of_row[2][tile_slabs * slab_rows];
};
template <class Shape>
struct RowFactorMemory<Shape, false> {};

template <class Shape>
struct Shared {
  /// Tokens in swizzled panels of 128 bytes of K.
  alignas(1024) std::byte rows[Shape::row_stages][Shape::row_stage_bytes];
  /// Chunks as they lie in memory.
  alignas(128) std::byte weights[Shape::weight_stages][Shape::weight_stage_bytes];
  /// A stage's token scales: [group][Shape::place_of_scale(token)], f32.
  alignas(16) float scales[Shape::row_stages][Shape::scales_a_stage];

  [[no_unique_address]] ActivationMemory<Shape> activation;
  [[no_unique_address]] RowFactorMemory<Shape> row_factors;

  /// Where the rows of the row loader's task begin.
  const std::byte* row_begin[Shape::most_tokens];

  RingBarriers<Shape::weight_stages> weight_ring;
  RingBarriers<Shape::row_stages> row_ring;
};

/// Operands that are made of stored codes, and the factors of the task's weight rows, for each warpgroup its own.
template <class Shape, bool wanted = Shape::widens>
struct WidenedMemory {
  alignas(1024) std::byte operands[Shape::operand_stages][Shape::operand_stage_bytes];
  float row_factors[Shape::warpgroups][tile_slabs * slab_rows];
  RingBarriers<Shape::operand_stages> ring;
};
template <class Shape>
struct WidenedMemory<Shape, false> {};

/// Of large row blocks.
template <class Shape>
requires Shape::tokens_first struct Shared<Shape> {
  alignas(1024) std::byte rows[Shape::row_stages][Shape::row_stage_bytes];
  alignas(1024) std::byte weights[Shape::weight_stages][Shape::weight_stage_bytes];
  [[no_unique_address]] WidenedMemory<Shape> widened;
  alignas(16) float scales[Shape::row_stages][Shape::scales_a_stage];

  /// Results on their way out, a warp each.
  alignas(16) std::byte staged[Shape::math_warps][16 * Shape::staged_stride];
  /// Largest magnitudes of a token in either half of a tile, where two warpgroups share a group; of this task and of the one
  /// before.
  float peaks[2][Shape::warpgroups][Shape::half_tokens];

  const std::byte* row_begin[Shape::most_tokens];

  RingBarriers<Shape::weight_stages> weight_ring;
  RingBarriers<Shape::row_stages> row_ring;

  /// Where the tensor cores have their weights from.
  __device__ auto& operand_ring() {
    if constexpr (Shape::widens) {
      return widened.ring;
    } else {
      return weight_ring;
    }
  }
  __device__ std::byte* operands(int stage) {
    if constexpr (Shape::widens) {
      return widened.operands[stage];
    } else {
      return weights[stage];
    }
  }
};

}  // namespace heddle::sm90
