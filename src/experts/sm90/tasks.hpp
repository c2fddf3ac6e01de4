// What a CTA of the tile engine does next, one source for host and device.
//
// A task is one tile of weight rows times one row block of an expert. Tasks are numbered expert by expert, within
// an expert tile by tile, and the row blocks of a tile follow each other: CTAs that run at the same time share
// weights. Every role of a CTA works the list out for itself; nothing is handed around.
#pragma once

#include "experts/activation/flat_list.hpp"
#include "heddle/formats.hpp"

namespace heddle::sm90 {

/// Row blocks of an expert: as few as there can be.
HEDDLE_HOST_DEVICE constexpr int blocks_of(int rows, int most_tokens) { return (rows + most_tokens - 1) / most_tokens; }

/// Rows of each of them but the last: about the same number, in eights, as two halves take less time than a full one and a rest.
HEDDLE_HOST_DEVICE constexpr int rows_a_block(int rows, int blocks) { return ((rows + blocks - 1) / blocks + 7) / 8 * 8; }

/// The smallest tile that covers a block's rows: 8, 16 or 32 where row blocks are small, else a multiple of 32.
HEDDLE_HOST_DEVICE constexpr int tile_tokens(int rows, int most_tokens) {
  const int small = rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
  return most_tokens <= 32 ? small : (rows + 31) / 32 * 32;
}

/// Rows [first, first + rows) of an expert times one tile of its weights.
struct Task {
  int expert = 0;
  int tile = 0;
  int first = 0;
  int rows = 0;
  int flat = 0;  ///< of the first row: its number among the rows of all experts
};

/// All tasks of a product. By expert: the inclusive prefix sums of rows and of row blocks.
struct TaskList {
  const int* row_end = nullptr;
  const int* block_end = nullptr;
  int experts = 0;
  int tiles = 0;
  int most_tokens = 0;

  HEDDLE_HOST_DEVICE int count() const { return experts == 0 ? 0 : tiles * block_end[experts - 1]; }

  HEDDLE_HOST_DEVICE Task find(int index) const {
    const int expert = find_expert(block_end, experts, index / tiles);
    const int begin = expert == 0 ? 0 : block_end[expert - 1];
    const int blocks = block_end[expert] - begin;
    const int local = index - begin * tiles;
    const int row_begin = expert == 0 ? 0 : row_end[expert - 1];
    const int rows = row_end[expert] - row_begin;
    const int block = rows_a_block(rows, blocks);
    const int first = local % blocks * block;
    const int left = rows - first;
    return {expert, local / blocks, first, left < block ? left : block, row_begin + first};
  }
};

}  // namespace heddle::sm90
