// The work of the fused layer in pieces, and their order (fused-kernel article, sections 3.2 to 3.6). Pure functions.
//
// An expert's rows are cut into row blocks, numbered over all experts of a rank in expert order. A GEMM 1 task is a row block times
// 256 weight rows, 128 gate and 128 up: 128 activations. A GEMM 2 task is a row block times 256 output columns. GEMM 2 sums over
// activations in steps of 128, so its step k reads what GEMM 1 task k has made.
#pragma once

#include <cstdint>

#include "experts/activation/flat_list.hpp"
#include "heddle/formats.hpp"

namespace heddle {

constexpr int step_columns = 128;  ///< activations of a GEMM 1 task, and of a step of a GEMM 2 task
constexpr int task_columns = 256;  ///< output columns of a GEMM 2 task

HEDDLE_HOST_DEVICE constexpr int parts_of(int size, int part) { return (size + part - 1) / part; }

struct MegaTask {
  enum class Kind : std::uint8_t { gemm1, gemm2 };
  Kind kind = Kind::gemm1;
  int block = 0;  ///< of the rank's row blocks
  int part = 0;   ///< which 128 activations, or which 256 columns

  friend bool operator==(const MegaTask&, const MegaTask&) = default;
};

/// All tasks of a rank in one line. Workers take them from its beginning, each the next one that nobody has taken.
///
/// First GEMM 1 of `lag` row blocks, the warm-up; then, round by round, GEMM 1 of a row block and GEMM 2 of the one `lag` before
/// it, in turn; then GEMM 2 of the last ones. Every task comes after those that it waits for, so what a taken task waits for has
/// been taken, too. GEMM 1 of block b comes after all of GEMM 2 of block b - (lag + 1), so a ring of lag + 1 blocks suffices.
struct MegaSchedule {
  int blocks = 0;
  int gemm1_tasks = 1;  ///< of a row block
  int gemm2_tasks = 1;
  int lag = 1;

  HEDDLE_HOST_DEVICE int a_block() const { return gemm1_tasks + gemm2_tasks; }
  HEDDLE_HOST_DEVICE int tasks() const { return blocks * a_block(); }
  HEDDLE_HOST_DEVICE int warm_up_blocks() const { return lag < blocks ? lag : blocks; }

  /// The task at a place of the line, 0 <= place < tasks().
  HEDDLE_HOST_DEVICE MegaTask task(int place) const {
    const int warm_up = warm_up_blocks() * gemm1_tasks;
    if (place < warm_up) return {MegaTask::Kind::gemm1, place / gemm1_tasks, place % gemm1_tasks};
    const int after = place - warm_up;
    const int rounds = blocks - warm_up_blocks();
    const int round = after / a_block();
    if (round < rounds) return alternating(round, after % a_block());
    const int drained = after - rounds * a_block();
    return {MegaTask::Kind::gemm2, rounds + drained / gemm2_tasks, drained % gemm2_tasks};
  }

 private:
  /// The two kinds spread evenly over a round.
  HEDDLE_HOST_DEVICE MegaTask alternating(int round, int place) const {
    const auto gemm1_before = [this](int end) {
      return static_cast<int>(static_cast<std::int64_t>(end) * gemm1_tasks / a_block());
    };
    const int before = gemm1_before(place);
    if (gemm1_before(place + 1) > before) return {MegaTask::Kind::gemm1, round + lag, before};
    return {MegaTask::Kind::gemm2, round, place - before};
  }
};

/// Blocks of warm-up: enough that when GEMM 2 of a block is taken, its GEMM 1 was taken a whole round of all workers before.
HEDDLE_HOST_DEVICE constexpr int lag_of(int workers, int gemm1_tasks) { return parts_of(workers, gemm1_tasks) + 1; }

/// Row blocks that can be live at once: those of the schedule, one whose rows are on their way, and one for each expert, so that a
/// batch whose experts have one block each never waits for room.
HEDDLE_HOST_DEVICE constexpr int live_blocks(int lag, int local_experts) { return lag + 2 + local_experts; }

/// Where a row block lies in a ring, and how often its place was used before.
struct RingPlace {
  int block = 0;
  int generation = 0;
};
HEDDLE_HOST_DEVICE constexpr RingPlace ring_place(int block, int ring_blocks) { return {block % ring_blocks, block / ring_blocks}; }

/// Whose row an expert's row is.
struct RowSource {
  int rank = 0;
  int number = 0;  ///< among the rows of that rank for this expert
};

/// Row `row` of an expert that gets counts(s) rows from rank s: sources take turns, each with its next row as long as it has some,
/// so that all links are in use at any time.
template <class Counts>
HEDDLE_HOST_DEVICE RowSource source_of_row(int ranks, Counts counts, int row) {
  if (ranks == 1) return {0, row};
  // Rows of the first `turns` turns: in each, a source that still has a row gives one.
  const auto rows_of_turns = [&](int turns) {
    int rows = 0;
    for (int s = 0; s < ranks; ++s) rows += counts(s) < turns ? counts(s) : turns;
    return rows;
  };
  int turn = 0;  // the last one that begins at or before `row`
  for (int end = row + 1; end - turn > 1;) {
    const int middle = turn + (end - turn) / 2;
    (rows_of_turns(middle) <= row ? turn : end) = middle;
  }
  int left = row - rows_of_turns(turn);
  for (int s = 0; s < ranks; ++s) {
    if (counts(s) > turn && left-- == 0) return {s, turn};
  }
  return {};
}

/// The row blocks of a rank's experts. Views into ordinary memory.
struct MegaBlocks {
  int local_experts = 0;
  int block_rows = 1;
  const std::int32_t* rows = nullptr;  ///< [local experts]
  const std::int32_t* ends = nullptr;  ///< [local experts]: row blocks of this expert and those before it

  HEDDLE_HOST_DEVICE int count() const { return local_experts == 0 ? 0 : ends[local_experts - 1]; }
  HEDDLE_HOST_DEVICE int begin(int expert) const { return expert == 0 ? 0 : ends[expert - 1]; }
  /// The expert of a row block: the first whose blocks end behind it.
  HEDDLE_HOST_DEVICE int expert_of(int block) const { return find_expert(ends, local_experts, block); }
  /// How many rows a block of an expert really has.
  HEDDLE_HOST_DEVICE int rows_of(int expert, int block) const {
    const int left = rows[expert] - (block - begin(expert)) * block_rows;
    return left < block_rows ? left : block_rows;
  }
};

}  // namespace heddle
