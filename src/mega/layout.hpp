// The fused layer's buffer: one in every rank's part of the heap, all of one layout (fused-kernel article, sections 3.1 and 5.1).
// What other ranks reach: the input region, which they pull from; tables and counts, where they announce; result slots, which they
// push into. What a rank reaches alone: the two rings, and the words that count in them.
#pragma once

#include "exchange/areas.hpp"
#include "formats/row_format.hpp"
#include "heddle/shape.hpp"
#include "mega/schedule.hpp"

namespace heddle {

/// Activations between the GEMMs, in steps of 128 columns that are written and read by themselves: values row by row, and scales
/// apart from them.
struct StepFormat {
  int width = 0;
  Activation activation = Activation::fp8;
  Quantisation quantisation;
  /// A step's scales are padded to so many bytes: who stores whole words shares none with another step, kernels store bytes.
  int scale_unit = sizeof(std::uint32_t);

  HEDDLE_HOST_DEVICE int steps() const { return parts_of(width, step_columns); }
  /// Columns of a step; the last one may be narrow.
  HEDDLE_HOST_DEVICE int columns(int step) const {
    const int left = width - step * step_columns;
    return left < step_columns ? left : step_columns;
  }
  HEDDLE_HOST_DEVICE std::size_t value_bytes(int columns_of) const {
    return static_cast<std::size_t>(columns_of) * (activation == Activation::fp8 ? 1 : 2);
  }
  HEDDLE_HOST_DEVICE std::size_t row_bytes() const { return align_up(value_bytes(width), RowFormat::alignment); }
  /// Bytes of a step's scales that mean something.
  HEDDLE_HOST_DEVICE std::size_t scale_bytes(int step) const {
    if (activation == Activation::bf16) return 0;
    const auto groups = static_cast<std::size_t>(parts_of(columns(step), quantisation.group));
    return groups * (quantisation.scale == ScaleFormat::f32 ? sizeof(float) : 1);
  }
  HEDDLE_HOST_DEVICE std::size_t scale_stride() const {
    return steps() == 0 ? 0 : align_up(scale_bytes(0), static_cast<std::size_t>(scale_unit));
  }
  HEDDLE_HOST_DEVICE std::size_t scale_row_bytes() const {
    return align_up(static_cast<std::size_t>(steps()) * scale_stride(), sizeof(std::uint32_t));
  }
};

/// A region of rows of activations: values, then scales.
struct StepRegion {
  StepFormat format;
  std::size_t begin = 0;
  std::size_t rows = 0;

  HEDDLE_HOST_DEVICE std::size_t values(std::size_t row, int step) const {
    return begin + row * format.row_bytes() + format.value_bytes(step * step_columns);
  }
  HEDDLE_HOST_DEVICE std::size_t scales(std::size_t row, int step) const {
    return begin + rows * format.row_bytes() + row * format.scale_row_bytes() +
           static_cast<std::size_t>(step) * format.scale_stride();
  }
  HEDDLE_HOST_DEVICE std::size_t bytes() const { return rows * (format.row_bytes() + format.scale_row_bytes()); }
  HEDDLE_HOST_DEVICE std::size_t end() const { return begin + bytes(); }
};

/// Things of one size behind each other, for loops that shall not work out offsets again and again.
struct Stretch {
  std::size_t begin = 0;
  std::size_t stride = 0;

  HEDDLE_HOST_DEVICE std::size_t at(int i) const { return begin + static_cast<std::size_t>(i) * stride; }
};

/// Where the result of a row goes.
struct MegaOrigin {
  std::int32_t rank = 0;
  std::int32_t pair = 0;  ///< token * topk + choice there
};

/// A kernel may cut the options' row blocks into smaller ones, which its tiles can take, but into none of fewer rows than this.
constexpr int least_cut_rows = 32;
HEDDLE_HOST_DEVICE constexpr int cut_rows(int block_rows) { return block_rows < least_cut_rows ? block_rows : least_cut_rows; }

struct MegaLayout {
  ExchangeShape shape;
  RowFormat wire;           ///< of input and arrived rows
  RowFormat returned;       ///< of slots
  StepFormat activated;     ///< of the routed experts
  StepFormat shared;        ///< of the shared expert
  bool has_shared = false;  ///< does one run inside?
  /// Every rank has one more expert, the last one there, and the last choice of every own token is it, with weight 1: `shape`
  /// counts both, inputs have one choice less.
  bool extra_expert = false;
  /// Results are added to their token's sum at home as they come (Combine::add): there are no slots.
  bool adds = false;
  int block_rows = step_columns;  ///< rows of a row block
  int lag = 1;                    ///< of the schedule
  int ring_blocks = 1;            ///< row blocks that the rings hold
  Areas areas;

  HEDDLE_HOST_DEVICE int gemm1_tasks() const { return activated.steps(); }
  HEDDLE_HOST_DEVICE int gemm2_tasks() const { return parts_of(wire.hidden, task_columns); }
  /// Where the rings hold all row blocks, GEMM 1 of all of them comes first: then no GEMM 2 waits, and the short tasks are the
  /// last.
  HEDDLE_HOST_DEVICE MegaSchedule schedule(int blocks) const {
    return {blocks, gemm1_tasks(), gemm2_tasks(), blocks <= ring_blocks ? blocks : lag};
  }

  /// Experts that inputs may choose.
  HEDDLE_HOST_DEVICE int given_experts() const { return shape.experts - (extra_expert ? shape.ranks : 0); }

  // Words that other ranks write, in the rows that all ways share.
  HEDDLE_HOST_DEVICE std::size_t announced_word(int source) const { return word_at(areas, shape.ranks, dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t ready_word(int worker) const { return word_at(areas, shape.ranks, combine_words, worker); }

  // Words of this rank alone, where nothing but the fused layer's words ever lies. Counters that all workers add to have 128 bytes
  // to themselves.
  HEDDLE_HOST_DEVICE std::size_t counted_word() const { return areas.mega_words; }
  HEDDLE_HOST_DEVICE std::size_t claim_word() const { return areas.mega_words + 128; }
  HEDDLE_HOST_DEVICE std::size_t finished_word() const { return areas.mega_words + 256; }
  HEDDLE_HOST_DEVICE std::size_t filled_word(int ring_block) const { return areas.mega_words + 384 + words(ring_block, 1); }
  HEDDLE_HOST_DEVICE std::size_t freed_word(int ring_block) const { return filled_word(ring_blocks) + words(ring_block, 1); }
  HEDDLE_HOST_DEVICE std::size_t step_word(int ring_block, int step) const {
    return freed_word(ring_blocks) + words(ring_block, gemm1_tasks()) + words(step, 1);
  }
  HEDDLE_HOST_DEVICE std::size_t shared_step_word(int block, int step) const {
    return step_word(ring_blocks, 0) + words(block, shared.steps()) + words(step, 1);
  }
  /// The shared expert's row blocks, at most: however small a kernel cuts them, there is room for their words.
  HEDDLE_HOST_DEVICE int shared_blocks() const { return has_shared ? parts_of(shape.cap, cut_rows(block_rows)) : 0; }
  HEDDLE_HOST_DEVICE std::size_t word_bytes() const { return shared_step_word(shared_blocks(), 0) - areas.mega_words; }

  // Dispatch area: the input region, tables and counts, the arrived ring, the intermediate ring, the shared expert's activations.
  HEDDLE_HOST_DEVICE std::size_t row(int token) const { return areas.dispatch + size(token) * wire.row_bytes(); }
  /// A token's ids, then its weights.
  HEDDLE_HOST_DEVICE std::size_t routing(int token) const { return row(shape.cap) + size(token) * routing_bytes(shape.topk); }
  HEDDLE_HOST_DEVICE std::size_t weight(int pair) const {
    return routing(pair / shape.topk) + sizeof(float) * size(shape.topk + pair % shape.topk);
  }
  /// The pair that is row `number` of those from `source` for an expert.
  HEDDLE_HOST_DEVICE std::size_t index(int local_expert, int source, int number) const {
    return routing(shape.cap) + sizeof(std::int32_t) * (region(local_expert, source) * size(shape.cap) + size(number));
  }
  HEDDLE_HOST_DEVICE std::size_t count(int local_expert, int source) const {
    return index(shape.max_local_experts, 0, 0) + sizeof(std::int32_t) * region(local_expert, source);
  }
  HEDDLE_HOST_DEVICE std::size_t ring_rows() const { return size(ring_blocks) * size(block_rows); }
  HEDDLE_HOST_DEVICE std::size_t arrived(std::size_t ring_row) const {
    return align_up(count(shape.max_local_experts, 0), 128) + ring_row * wire.row_bytes();
  }
  HEDDLE_HOST_DEVICE std::size_t origin(std::size_t ring_row) const { return arrived(ring_rows()) + ring_row * sizeof(MegaOrigin); }
  HEDDLE_HOST_DEVICE std::size_t row_weight(std::size_t ring_row) const { return origin(ring_rows()) + ring_row * sizeof(float); }
  HEDDLE_HOST_DEVICE Stretch input_rows() const { return {row(0), wire.row_bytes()}; }
  HEDDLE_HOST_DEVICE Stretch arrived_rows() const { return {arrived(0), wire.row_bytes()}; }
  HEDDLE_HOST_DEVICE Stretch origins() const { return {origin(0), sizeof(MegaOrigin)}; }
  HEDDLE_HOST_DEVICE Stretch row_weights() const { return {row_weight(0), sizeof(float)}; }
  HEDDLE_HOST_DEVICE StepRegion intermediate() const { return {activated, align_up(row_weight(ring_rows()), 128), ring_rows()}; }
  HEDDLE_HOST_DEVICE StepRegion shared_intermediate() const {
    return {shared, align_up(intermediate().end(), 128), has_shared ? size(shape.cap) : 0};
  }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes() const { return shared_intermediate().end() - areas.dispatch; }

  // Combine area: slots [token][choice] of this rank's own tokens, unless results are added; then the shared expert's, one a token,
  // which never travel and are bf16. Written only after rows are counted: before, ranks that are late in another call may still
  // pull from this area.
  HEDDLE_HOST_DEVICE std::size_t slot(int pair) const { return areas.combine + size(pair) * returned.row_bytes(); }
  HEDDLE_HOST_DEVICE Stretch slots(int token) const { return {slot(token * shape.topk), returned.row_bytes()}; }
  HEDDLE_HOST_DEVICE RowFormat plain() const { return {Wire::bf16, returned.hidden, {}, 1.0f}; }
  HEDDLE_HOST_DEVICE std::size_t shared_slot(int token) const {
    return slot(adds ? 0 : shape.cap * shape.topk) + size(token) * plain().row_bytes();
  }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes() const { return shared_slot(has_shared ? shape.cap : 0) - areas.combine; }

  // Sums, where results are added: a bf16 row an own token. An area of their own, since zeros are written before the announcement,
  // and what others add before the sum is read: in between, calls of other ways may still or already use the other areas.
  HEDDLE_HOST_DEVICE std::size_t sum(int token) const { return areas.mega_sums + size(token) * plain().row_bytes(); }
  HEDDLE_HOST_DEVICE Stretch sums(int token) const { return {sum(token), plain().row_bytes()}; }
  HEDDLE_HOST_DEVICE std::size_t sum_bytes() const { return adds ? sum(shape.cap) - areas.mega_sums : 0; }

 private:
  HEDDLE_HOST_DEVICE static std::size_t size(int value) { return static_cast<std::size_t>(value); }
  HEDDLE_HOST_DEVICE std::size_t region(int local_expert, int source) const {
    return size(local_expert) * size(shape.ranks) + size(source);
  }
  HEDDLE_HOST_DEVICE static std::size_t words(int rows, int a_row) { return sizeof(Word) * size(rows) * size(a_row); }
};

/// Rows that can arrive at a rank at most: a token goes to no more experts than a rank has.
HEDDLE_HOST_DEVICE constexpr std::size_t worst_rows(const ExchangeShape& shape) {
  const int copies = shape.topk < shape.max_local_experts ? shape.topk : shape.max_local_experts;
  return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.cap) * static_cast<std::size_t>(copies);
}

/// Row blocks that they can make: an expert gets a token once, and its last block may have a single row.
HEDDLE_HOST_DEVICE constexpr std::size_t worst_blocks(const ExchangeShape& shape, int block_rows) {
  const auto block = static_cast<std::size_t>(block_rows);
  const auto local = static_cast<std::size_t>(shape.max_local_experts);
  const std::size_t of_an_expert =
      (static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.cap) + block - 1) / block;
  const std::size_t of_all = (worst_rows(shape) + local * (block - 1)) / block;
  return local * of_an_expert < of_all ? local * of_an_expert : of_all;
}

}  // namespace heddle
