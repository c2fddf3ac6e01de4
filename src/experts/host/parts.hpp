// Parts of one expert over a few rows: what the fused layer's tasks compute, on the same tile engine as whole calls.
#pragma once

#include "experts/host/chain.hpp"

namespace heddle {

constexpr int activation_part = 128;  ///< columns of the intermediate size in a part, and of the hidden size
constexpr int result_part = 256;

/// GEMM 1 and activation of columns [128 part, ...) of the intermediate size; into the workspace.
RowView run_activations(const ExpertSet& set, const RowView& rows, int count, const float* weights, int expert, int part,
                        ExpertWorkspace& workspace);

/// GEMM 2 of columns [256 part, ...) of the hidden size; row i at out.values + i * out.stride.
void run_results(const ExpertSet& set, const RowView& activations, int count, int expert, int part, ExpertWorkspace& workspace,
                 const GemmOutput& out);

}  // namespace heddle
