// Grouped products without an activation between them: what GEMM 1 and GEMM 2 of the runners are, for those who bring the rest.
#pragma once

#include <span>

#include "heddle/experts.hpp"

namespace heddle {

/// out[i] = bf16(rows[i] times weights[group_of[i]], transposed) as the tile engine has it (docs/numerics.md, GEMM 1); rows of
/// group -1 are neither read nor written. weights: [N, K] each, of one size; rows: K values, bf16 ones are quantised if the
/// activation is fp8; out.stride: 0 means N. Throws InputError for groups and sizes that do not fit, before anything is written.
void grouped_product(const RowView& rows, std::span<const int> group_of, std::span<const WeightMatrix> weights,
                     Activation activation, const Quantisation& quantisation, ResultRows out);

}  // namespace heddle
