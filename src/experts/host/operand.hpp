// The token side of a GEMM: rows gathered from where they arrived and widened to f32, in the order in
// which the tile engine reads them.
#pragma once

#include "experts/host/scratch.hpp"
#include "heddle/experts.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// Rows of one expert, widened. values is [steps, padded, 128]: rows beyond `count` are zero, so are the
/// columns of a short last step. scales is [groups, padded], null for bf16.
class Operand {
 public:
  /// `count` rows of `cols` values: those that `rows` names, or the first ones of the view without `rows`.
  /// bf16 rows are group-quantised first if the activation is fp8.
  void pack(const RowView& view, const int* rows, int count, int cols, Activation activation, const Quantisation& quantisation);

  int count() const { return count_; }
  int cols() const { return cols_; }
  /// Values of K that share a scale: 128 or 32; 128 for bf16, where it is 1.
  int group() const { return group_; }
  /// The 128-column step of a row and all rows after it.
  const float* values(int step, int row) const;
  /// The scale of a group of columns of a row.
  float scale(int group, int row) const;

 private:
  void pack_fp8(const std::byte* values, const std::byte* scales, ScaleFormat format, int row);
  void pack_bf16(const std::byte* values, int row);

  int count_ = 0;
  int padded_ = 0;
  int cols_ = 0;
  int group_ = 128;
  bool scaled_ = false;
  Scratch<float> values_;
  Scratch<float> scales_;
  Scratch<float> wide_;  // one row on its way to being quantised
  Scratch<std::uint8_t> codes_;
  Scratch<std::byte> code_scales_;
};

}  // namespace heddle
