// Ordered weights on the host's side: parts of stored matrices, what is wrong with them in words, and the order made by a plain
// loop.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "experts/sm90/weight_order.hpp"
#include "experts/sm90/weight_scales.hpp"
#include "experts/sm90/weight_words.hpp"
#include "heddle/experts.hpp"

namespace heddle::sm90 {

/// Columns or rows [first, first + count) of a matrix.
struct Range {
  int first = 0;
  int count = 0;
};

/// The sizes of a stored matrix whose rows follow each other, as WeightMatrix wants them.
struct StoredShape {
  WeightKind kind = WeightKind::bf16;
  int rows = 0;
  int cols = 0;
  ScaleFormat block_scale = ScaleFormat::f32;  ///< fp8_block

  std::size_t value_pitch() const;  ///< bytes of a row
  std::size_t scale_pitch() const;  ///< bytes of a row of scales
  int scale_rows() const;
  std::size_t value_bytes() const { return static_cast<std::size_t>(rows) * value_pitch(); }
  std::size_t scale_bytes() const { return static_cast<std::size_t>(scale_rows()) * scale_pitch(); }
};

/// A part of a matrix, as a view. Throws InputError, with `name`, unless both ranges are inside, in multiples of 64, and begin
/// where a scale block does (fp8_block: at a multiple of 128).
StoredMatrix stored_part(const WeightMatrix& matrix, const Range& rows, const Range& cols, const std::string& name);

/// Throws InputError for a row that cannot be laid out; nothing for RowFault::none. `names`: what the two stored matrices are
/// called.
void throw_row_fault(const WeightPlan& plan, const WeightSource& source, int row, const RowSurvey& survey,
                     const std::string (&names)[2]);

/// A matrix in the order of the plan.
struct OrderedWeights {
  std::vector<std::byte> chunks;  ///< plan.bytes()
  std::vector<float> row_scales;  ///< plan.row_scales()
};

/// Throws InputError for rows that cannot be laid out.
OrderedWeights order_weights(const WeightPlan& plan, const WeightSource& source, const std::string (&names)[2]);

/// A stored matrix with its memory.
struct StoredWeights {
  std::vector<std::byte> values;
  std::vector<std::byte> scales;
  WeightMatrix view;  ///< of both vectors; moving the object keeps it right

  StoredWeights() = default;
  explicit StoredWeights(const StoredShape& shape);
  StoredWeights(StoredWeights&&) = default;
  StoredWeights& operator=(StoredWeights&&) = default;
};

/// Reads ordered weights back: gate and up where the plan is paired, otherwise one matrix. Byte for byte what was stored.
std::vector<StoredWeights> restore_weights(const WeightPlan& plan, const std::byte* chunks, const float* row_scales,
                                           ScaleFormat block_scale);

}  // namespace heddle::sm90
