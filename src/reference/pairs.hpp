// The six steps of one pair (docs/numerics.md), for many rows of one expert at once.
#pragma once

#include <span>

#include "heddle/experts.hpp"
#include "heddle/formats.hpp"
#include "reference/reference.hpp"

namespace heddle::reference {

/// Step 1 behind a wire: what GEMM 1 takes of a token's hidden state, [H].
void expert_input(std::span<const bf16> hidden, Wire wire, Activation activation, const ReferenceOptions& options,
                  std::span<double> out);

/// Steps 2 to 6. x is [rows, H] from expert_input; weights [rows] are the routing weights where they
/// belong to the activation, empty otherwise; results [rows, H].
void expert_results(const ExpertWeights& expert, std::span<const double> x, int rows, std::span<const float> weights,
                    Activation activation, const ReferenceOptions& options, std::span<bf16> results);

}  // namespace heddle::reference
