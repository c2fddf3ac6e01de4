// GEMM 1, activation, GEMM 2 over sorted pairs: what the three runners share.
#pragma once

#include <vector>

#include "experts/host/workspace.hpp"
#include "heddle/experts.hpp"

namespace heddle {

/// The experts of a layer, checked.
struct ExpertSet {
  std::vector<ExpertWeights> experts;
  int hidden = 0;
  int intermediate = 0;
  ExpertOptions options;
};

/// Computes workspace.pairs into out. `first` is the expert that masked_m[0] belongs to.
void run_chain(const ExpertSet& set, int first, const RowView& rows, ExpertWorkspace& workspace, const GemmOutput& out,
               ExpertReport& report);

}  // namespace heddle
