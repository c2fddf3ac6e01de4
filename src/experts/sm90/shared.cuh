// The shared memory of a CTA of the tile engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/ring.cuh"
#include "experts/sm90/tile.hpp"

namespace heddle::sm90 {

/// The fused activation: values on their way out, largest magnitudes by slab and warp, what makes codes (a scale, or the inverse of
/// a power of two) by group.
template <class Shape, bool wanted = Shape::activates>
struct ActivationMemory {
  alignas(16) std::byte values[Shape::most_tokens * Shape::activated_stride];
  float peaks[tile_slabs * 4][Shape::most_tokens];
  float factors[tile_slabs][Shape::most_tokens];
};
template <class Shape>
struct ActivationMemory<Shape, false> {};

/// Weight rows' own factors, of this task and of the next; each warp brings those of its rows.
template <class Shape, bool wanted = slab_shape(Shape::kind).row_scales>
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
  /// A stage's token scales: [group][scale_place(token)], f32, or (e4m3 with ue8m0 by 128) the upper halves of f32.
  alignas(16) float scales[Shape::row_stages][Shape::scales_a_stage];

  [[no_unique_address]] ActivationMemory<Shape> activation;
  [[no_unique_address]] RowFactorMemory<Shape> row_factors;

  /// Where the rows of the row loader's task begin.
  const std::byte* row_begin[Shape::most_tokens];

  RingBarriers<Shape::weight_stages> weight_ring;
  RingBarriers<Shape::row_stages> row_ring;

  /// Behind the struct, [experts] each: where an expert's rows end, and its row blocks.
  __device__ int* row_end() { return reinterpret_cast<int*>(this + 1); }
  __device__ int* block_end(int experts) { return row_end() + experts; }

  static constexpr std::size_t bytes(int experts) { return sizeof(Shared) + static_cast<std::size_t>(experts) * 2 * sizeof(int); }
};

}  // namespace heddle::sm90
