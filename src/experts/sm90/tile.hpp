// The shapes of the Hopper tile engine: what a CTA works on, and what its stages hold.
//
// Here the product is swapped: weight rows are the M side of the tensor cores, tokens the N side. So a row block
// may be as small as 8 tokens, and weights of every kind go through registers, where 4-bit ones are widened. Large row blocks of
// e4m3 operands have a shape of their own, with tokens first: large_tile.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/weight_order.hpp"
#include "heddle/formats.hpp"
#include "trace/device.hpp"

namespace heddle::sm90 {

inline constexpr int warp_threads = 32;
inline constexpr int warpgroup_threads = 128;
/// Values of K a promotion, and a stage.
inline constexpr int stage_columns = 128;
/// Bytes of a token in a panel: a row of the 128-byte swizzle.
inline constexpr int panel_bytes = 128;
/// Shared memory that a CTA can have on sm_90, in bytes, less what taking time stamps needs.
inline constexpr int most_shared_bytes = 227 * 1024 - trace::cell_bytes;

/// How the weights' kind enters the promotion of a step, or the end.
enum class WeightScale : std::uint8_t {
  none,
  by_block,  ///< fp8_block: an f32 a step for each half of a warp's rows
  by_step,   ///< mxfp4: perhaps a power of two for each row and step; and one a row, at the end
  constant,  ///< nvfp4: one a row, in every promotion
  at_end,    ///< mxfp8: a power of two a row
};

constexpr WeightScale weight_scale(WeightKind kind) {
  switch (kind) {
    case WeightKind::fp8_block:
      return WeightScale::by_block;
    case WeightKind::mxfp4:
      return WeightScale::by_step;
    case WeightKind::nvfp4:
      return WeightScale::constant;
    case WeightKind::mxfp8:
      return WeightScale::at_end;
    case WeightKind::bf16:
      break;
  }
  return WeightScale::none;
}

/// Whether a kind has row blocks between the small and the large ones.
constexpr bool has_medium_blocks(WeightKind kind) { return kind == WeightKind::mxfp4; }

/// Where a token's scale lies in a stage: for every 32 tokens the eight that a thread needs are neighbours.
HEDDLE_HOST_DEVICE constexpr int scale_place(int token) {
  return token / 32 * 32 + token % 8 / 2 * 8 + token % 32 / 8 * 2 + token % 2;
}

/// A shape whose kernel is for the usual call alone: token scales are powers of two, one for 128 values; weights have no step
/// exponents; the fused layer's results travel as bf16. What other calls need is not in it, since code that nobody runs lies
/// between code that is: with it 14% of all warps' samples had no instruction (docs/performance.md, "The fused layer").
template <class Shape>
struct Plain : Shape {
  static constexpr bool plain = true;
};
template <class Shape>
constexpr bool is_plain() {
  return requires { Shape::plain; };
}

/// Tokens of the tiles that a kernel has code for, in rising order: the last one covers any row block.
template <int... tokens>
struct TileSizes {};

/// The tiles of row blocks of at most `most` tokens. The kernels for the usual call have more of them.
template <int most, bool plain>
struct TilesOf;
template <>
struct TilesOf<32, true> {
  using Sizes = TileSizes<8, 16, 24, 32>;
};
template <>
struct TilesOf<32, false> {
  using Sizes = TileSizes<8, 16, 32>;
};
template <>
struct TilesOf<64, true> {
  using Sizes = TileSizes<16, 24, 32, 48, 64>;
};
template <>
struct TilesOf<64, false> {
  using Sizes = TileSizes<32, 48, 64>;
};
template <bool plain>
struct TilesOf<96, plain> {
  using Sizes = TileSizes<32, 64, 96>;
};

/// One configuration of the engine: `warpgroups` math warpgroups share the 4 slabs of a tile, a row block has at
/// most `tokens` tokens. Few warpgroups with many registers hold large row blocks, many hide the widening of small ones, or their
/// activation.
template <WeightKind kind_, int warpgroups_, int tokens_, bool activates_>
struct TileShape {
  static constexpr WeightKind kind = kind_;
  static constexpr bool activates = activates_;  ///< gate and up in the epilogue; else sums are stored
  static constexpr Operand operand = slab_shape(kind).operand;
  static constexpr bool tokens_first = false;
  static constexpr int warpgroups = warpgroups_;
  static constexpr int slabs = tile_slabs / warpgroups;  ///< of a math warpgroup
  static constexpr int most_tokens = tokens_;
  static constexpr int block_unit = 8;  ///< any eight rows more are another tile's size, or another part of one

  static constexpr int math_warps = 4 * warpgroups;
  static constexpr int math_threads = warpgroup_threads * warpgroups;
  static constexpr int widening_threads = 0;
  static constexpr int threads = math_threads + warpgroup_threads;  ///< one more warpgroup loads
  /// Registers a thread, as setmaxnreg wants them: together what the launch allocates.
  static constexpr int math_registers = warpgroups == 4 ? 104 : 224;
  static constexpr int loader_registers = warpgroups == 4 ? 64 : 56;

  /// Weight chunks of a stage, and panels of its tokens: K = 128 is one of e4m3, two of bf16.
  static constexpr int parts = stage_columns / slab_shape(kind).step;
  static constexpr int weight_stage_bytes =
      parts * WeightPlan{kind, false, kind == WeightKind::mxfp4, 0, 0}.chunk_bytes_of(tile_slabs);
  static constexpr int row_stage_bytes = parts * most_tokens * panel_bytes;
  static constexpr int row_stages = (most_tokens <= 32 ? 16 : most_tokens <= 64 ? 8 : 4) / parts;
  /// Stages whose rows are under way while the others are ready.
  static constexpr int rows_under_way = row_stages / 2;
  /// Rows that are copied at once where they lie one behind another.
  static constexpr int box_rows = most_tokens <= 32 ? 8 : most_tokens <= 64 ? 16 : 32;
  /// Groups of 32: four a token. Else one.
  static constexpr int scales_a_stage = 4 * most_tokens;
  HEDDLE_HOST_DEVICE static constexpr int place_of_scale(int token) { return scale_place(token); }
  /// f32 factors of a tile's weight rows: of this task and of the next.
  static constexpr int row_factor_bytes = slab_shape(kind).row_scales ? 2 * tile_slabs * slab_rows * 4 : 0;

  static constexpr int activated_bytes = operand == Operand::e4m3 ? 1 : 2;  ///< of a value: an operand of the second product
  static constexpr int activated_stride = stage_columns * activated_bytes;
  /// Values of a token on their way out, and words of its scales (shared_scales.cuh).
  static constexpr int activated_token_bytes = activates ? activated_stride + 2 * tile_slabs * 4 : 0;
  static constexpr int stage_bytes_of_rows = row_stage_bytes + scales_a_stage * 4 + 16;
  static constexpr int other_bytes =
      row_stages * stage_bytes_of_rows + most_tokens * (activated_token_bytes + 8) + row_factor_bytes + 16 + 1024;
  /// What is left goes to weights, whose stream must never stop: stages of `stage_bytes`. Beside `bytes` that somebody else wants
  /// of the CTA's memory.
  static constexpr int stages_beside(int bytes, int stage_bytes) {
    const int fit = (most_shared_bytes - other_bytes - bytes) / (stage_bytes + 16);
    return fit < 10 ? fit : 10;
  }
  static constexpr int weight_stages_beside(int bytes) { return stages_beside(bytes, weight_stage_bytes); }
  static constexpr int weight_stages = weight_stages_beside(8 * 1024);  ///< the lists of experts
  static_assert(weight_stages >= 2, "weights need two stages at least");
};

/// A shape whose ring of weights has a stage for each of a math warpgroup's slabs, one of every warpgroup, instead of one for all:
/// where chunks are large, as bf16's are, the same memory holds weights that are multiplied and weights on their way.
template <class Shape>
struct BySlab : Shape {
  static constexpr bool by_slab = true;
  static constexpr int weight_stage_bytes = Shape::weight_stage_bytes / Shape::slabs;
  static constexpr int weight_stages_beside(int bytes) { return Shape::stages_beside(bytes, weight_stage_bytes); }
  static constexpr int weight_stages = weight_stages_beside(8 * 1024);
  static_assert(weight_scale(Shape::kind) == WeightScale::none, "a chunk is its slabs");
};
template <class Shape>
constexpr bool is_by_slab() {
  return requires { Shape::by_slab; };
}

}  // namespace heddle::sm90
