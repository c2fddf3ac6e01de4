// What a CTA of the tile engine does next, one source for host and device.
//
// A task is one tile of weight rows times one row block of an expert. Tasks are numbered expert by expert, within
// an expert tile by tile, and the row blocks of a tile follow each other: CTAs that run at the same time share
// weights.
#pragma once

#include "experts/activation/flat_list.hpp"
#include "heddle/formats.hpp"

namespace heddle::sm90 {

/// Row blocks of an expert: as few as there can be.
HEDDLE_HOST_DEVICE constexpr int blocks_of(int rows, int most_tokens) { return (rows + most_tokens - 1) / most_tokens; }

/// Rows of each of them but the last: about the same number, in units. Where any eight rows may be a tile's size two halves take
/// less time than a full block and a rest.
HEDDLE_HOST_DEVICE constexpr int rows_a_block(int rows, int blocks, int unit) {
  return ((rows + blocks - 1) / blocks + unit - 1) / unit * unit;
}

/// Rows [first, first + rows) of an expert times one tile of its weights.
struct Task {
  int expert = 0;
  int tile = 0;
  int first = 0;
  int rows = 0;
  int flat = 0;    ///< of the first row: its number among the rows of all experts
  int blocks = 1;  ///< of the expert, which all read these weights
};

/// All tasks of a product. By expert: the inclusive prefix sums of rows and of row blocks.
struct TaskList {
  const int* row_end = nullptr;
  const int* block_end = nullptr;
  int experts = 0;
  int tiles = 0;
  int unit = 8;  ///< of the rows of a block

  HEDDLE_HOST_DEVICE int count() const { return experts == 0 ? 0 : tiles * block_end[experts - 1]; }

  HEDDLE_HOST_DEVICE Task find(int index) const {
    const int expert = find_expert(block_end, experts, index / tiles);
    const int begin = expert == 0 ? 0 : block_end[expert - 1];
    const int blocks = block_end[expert] - begin;
    const int local = index - begin * tiles;
    const int row_begin = expert == 0 ? 0 : row_end[expert - 1];
    const int rows = row_end[expert] - row_begin;
    const int block = rows_a_block(rows, blocks, unit);
    const int first = local % blocks * block;
    const int left = rows - first;
    return {expert, local / blocks, first, left < block ? left : block, row_begin + first, blocks};
  }
};

/// The tasks of one of `ctas` CTAs: one of every wave of that many, in each wave another place, so that row blocks of different
/// sizes go round.
class TaskTurns {
 public:
  HEDDLE_HOST_DEVICE TaskTurns(const TaskList& tasks, int cta, int ctas)
      : tasks_(tasks), count_(tasks.count()), ctas_(ctas), place_(cta) {}

  /// The next one, if there is one.
  HEDDLE_HOST_DEVICE bool next(Task& task) {
    const int index = first_ + place_;
    if (index >= count_) return false;
    first_ += ctas_;
    place_ = place_ + 1 == ctas_ ? 0 : place_ + 1;
    task = tasks_.find(index);
    return true;
  }

 private:
  const TaskList& tasks_;
  int count_;
  int ctas_;
  int first_ = 0;  ///< of the wave
  int place_;
};

}  // namespace heddle::sm90
