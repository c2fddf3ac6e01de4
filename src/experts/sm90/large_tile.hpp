// The shape of large row blocks of e4m3 operands: tokens come first, as the M side of the tensor cores, and both sides are read
// from shared memory.
//
// A tile is 256 weight rows times up to 128 tokens. Each of two warpgroups multiplies 64 tokens with all of the tile's weights or,
// where there are no more than 64, all tokens with half of the weights. A thread then has two tokens, so a promotion needs two
// token scales, and a token's activations are in one warp. Weights that lie in rows are read as they arrive; 4-bit ones are widened
// into shared memory by a warpgroup of its own.
#pragma once

#include "experts/sm90/tile.hpp"

namespace heddle::sm90 {

template <WeightKind kind_, bool activates_>
struct LargeShape {
  static constexpr WeightKind kind = kind_;
  static constexpr bool activates = activates_;  ///< gate and up in the epilogue; else sums are stored
  static constexpr Operand operand = slab_shape(kind).operand;
  static_assert(operand == Operand::e4m3);
  static constexpr bool tokens_first = true;
  static constexpr bool widens = is_widened(kind);  ///< a warpgroup makes operands of stored codes
  static constexpr int warpgroups = 2;
  static constexpr int most_tokens = 128;
  static constexpr int half_tokens = most_tokens / 2;  ///< of one instruction
  static constexpr int block_unit = most_tokens;       ///< 192 rows are a block of 128 and one of 64, without a row too much

  static constexpr int math_warps = 4 * warpgroups;
  static constexpr int math_threads = warpgroup_threads * warpgroups;
  static constexpr int widening_threads = widens ? warpgroup_threads : 0;
  static constexpr int threads = math_threads + widening_threads + warpgroup_threads;
  /// Registers a thread, as setmaxnreg wants them: together what the launch allocates.
  static constexpr int math_registers = widens ? 208 : 224;
  static constexpr int widening_registers = 56;
  static constexpr int loader_registers = widens ? 40 : 56;

  static constexpr int parts = 1;  ///< panels of a stage
  /// Operands of a stage, for the tensor cores; behind them come what the promotion needs of the chunk: block scales, step
  /// exponents.
  static constexpr int operand_bytes = tile_slabs * slab_rows * panel_bytes;
  static constexpr int operand_stage_bytes = operand_bytes + 1024;
  /// Of the chunks as they arrive; without widening these are the operands.
  static constexpr int weight_stage_bytes =
      widens ? WeightPlan{kind, false, true, 0, 0}.chunk_bytes_of(tile_slabs) : operand_stage_bytes;
  static constexpr int weight_stages = 4;
  static constexpr int operand_stages = 2;
  static constexpr int row_stage_bytes = most_tokens * panel_bytes;
  static constexpr int row_stages = widens ? 3 : 4;
  static constexpr int rows_under_way = row_stages / 2;
  static constexpr int box_rows = 32;
  static constexpr int scales_a_stage = 4 * most_tokens;
  HEDDLE_HOST_DEVICE static constexpr int place_of_scale(int token) { return token; }

  /// A warp's results on their way out: 16 tokens of 64 bytes, 16 more apart so that rows share no bank.
  static constexpr int staged_bytes = 64;
  static constexpr int staged_stride = staged_bytes + 16;
};

namespace detail {
template <WeightKind kind, bool activates, Operand operand = slab_shape(kind).operand>
struct LargeBlocksOf {
  using Shape = LargeShape<kind, activates>;
};
template <WeightKind kind, bool activates>
struct LargeBlocksOf<kind, activates, Operand::bf16> {
  using Shape = TileShape<kind, 2, 96, activates>;
};
}  // namespace detail

/// The shapes of small, medium and large row blocks of a kind. bf16 operands have weights first in all of them. Four warpgroups
/// hide the widening, or the activation; with neither, two with more registers take less time.
template <WeightKind kind, bool activates>
using SmallBlocks = TileShape<kind, is_widened(kind) || activates ? 4 : 2, 32, activates>;
/// Of those widened in registers: a second row block, or operands through shared memory, would take longer.
template <WeightKind kind, bool activates>
using MediumBlocks = TileShape<kind, 4, 64, activates>;
template <WeightKind kind, bool activates>
using LargeBlocks = typename detail::LargeBlocksOf<kind, activates>::Shape;

}  // namespace heddle::sm90
