// Exact widening of weight matrices, whatever the checkpoint's format.
#pragma once

#include <span>
#include <string>

#include "heddle/experts.hpp"

namespace heddle::reference {

/// One row of a matrix as doubles, all scales included: [cols].
void exact_row(const WeightMatrix& matrix, int row, std::span<double> out);

/// Throws InputError unless the matrix is [rows, cols] and its values and scales have the bytes that its kind wants.
/// `what` names it, e.g. "gate of expert 3".
void check_matrix(const WeightMatrix& matrix, int rows, int cols, const std::string& what);

}  // namespace heddle::reference
