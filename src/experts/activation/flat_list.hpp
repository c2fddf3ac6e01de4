// Which row is whose: the index arithmetic of the activation step, one source for host and device
// (persistent-grid article, "One number for each real row").
//
// The flat list is the real rows of all experts in one line, expert 0 first, gaps removed. It is never
// built in memory: the inclusive prefix sum row_end of the experts' row counts says which expert and
// which of its rows a flat row is. Experts without rows are skipped by the same rule.
#pragma once

#include <cstddef>

#include "heddle/formats.hpp"

namespace heddle {

/// row_end[e] = masked_m[0] + .. + masked_m[e]. Returns the number of rows.
HEDDLE_HOST_DEVICE inline int prefix_sum(const int* masked_m, int experts, int* row_end) {
  int end = 0;
  for (int expert = 0; expert < experts; ++expert) {
    end += masked_m[expert];
    row_end[expert] = end;
  }
  return end;
}

/// The expert of a flat row: the first whose end lies above it. The row must be below the last end.
HEDDLE_HOST_DEVICE inline int find_expert(const int* row_end, int experts, int row) {
  int low = 0;
  int high = experts - 1;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (row_end[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// One real row: its number in the flat list, its expert, and which of the expert's rows it is.
struct FlatRow {
  int flat = 0;
  int expert = 0;
  int row = 0;

  /// Where it lies in a buffer [experts, block_rows, ..]; with block_rows = 0 the buffer has no gaps.
  HEDDLE_HOST_DEVICE std::size_t place(int block_rows) const {
    return block_rows == 0
               ? static_cast<std::size_t>(flat)
               : static_cast<std::size_t>(expert) * static_cast<std::size_t>(block_rows) + static_cast<std::size_t>(row);
  }
};

HEDDLE_HOST_DEVICE inline FlatRow find_row(const int* row_end, int experts, int row) {
  const int expert = find_expert(row_end, experts, row);
  return {row, expert, expert == 0 ? row : row - row_end[expert - 1]};
}

/// Blocks of the padded grid: one for each row there can be. `most_tokens` is T, the tokens of all ranks.
HEDDLE_HOST_DEVICE constexpr int padded_blocks(int most_tokens, int topk) { return most_tokens * topk; }

/// Blocks of the persistent grid: one for each slot, a block that can be resident, and no more than can have a row.
HEDDLE_HOST_DEVICE constexpr int persistent_blocks(int slots, int most_tokens, int topk) {
  const int most_rows = padded_blocks(most_tokens, topk);
  return slots < most_rows ? slots : most_rows;
}

/// What block `block` of the padded grid does with `rows` real rows: its own row, if there is one. Returns how many.
template <class Row>
HEDDLE_HOST_DEVICE int padded_block(int block, const int* row_end, int experts, int rows, const Row& compute) {
  if (block >= rows) {
    return 0;
  }
  compute(find_row(row_end, experts, block));
  return 1;
}

/// What block `block` of a persistent grid of `blocks` does: rows block, block + blocks, ... Returns how many.
template <class Row>
HEDDLE_HOST_DEVICE int persistent_block(int block, int blocks, const int* row_end, int experts, int rows, const Row& compute) {
  int done = 0;
  for (int row = block; row < rows; row += blocks) {
    compute(find_row(row_end, experts, row));
    ++done;
  }
  return done;
}

}  // namespace heddle
