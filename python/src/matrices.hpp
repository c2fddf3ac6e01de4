// Weight matrices in arrays of Python, one an expert.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "heddle/experts.hpp"

namespace heddle::python {

/// Matrices [rows, cols] of one kind: bf16 values [count, rows, cols]; bytes otherwise, mxfp4 two values a byte, with scales:
/// fp8_block float32 [count, ceil(rows / 128), ceil(cols / 128)], mxfp4 and mxfp8 bytes [count, rows, cols / 32].
class MatrixStack {
 public:
  /// Throws InputError for what does not fit, naming it by `name` ("gate_up").
  MatrixStack(const std::string& name, WeightKind kind, nb::handle values, nb::handle scales);

  int count() const { return static_cast<int>(values_.size(0)); }
  int rows() const { return static_cast<int>(values_.size(1)); }
  int cols() const { return cols_; }
  WeightMatrix matrix(int index) const { return part(index, 0, rows()); }
  std::vector<WeightMatrix> matrices() const;
  /// Rows [first, first + rows) of a matrix; with fp8_block both are multiples of 128, or the part ends with the matrix.
  WeightMatrix part(int index, int first, int rows) const;

 private:
  WeightKind kind_;
  Lent values_;
  int cols_;
  std::optional<Lent> scales_;
};

}  // namespace heddle::python
