// The reference's GEMM: exact operands, sums in double, one rounding to bf16 at the end.
#pragma once

#include <span>

#include "heddle/experts.hpp"
#include "heddle/formats.hpp"

namespace heddle::reference {

/// out [rows, N] = bf16(x [rows, K] · weights [N, K] transposed). Each weight row is widened once.
void product(std::span<const double> x, int rows, const WeightMatrix& weights, std::span<bf16> out);

}  // namespace heddle::reference
