// What the experts of a rank move in a call, by the experts that had rows and the rows they had.
#pragma once

#include <vector>

#include "heddle/layer.hpp"

namespace heddle {

/// Adds the local bytes of gemm1, activation and gemm2 for report.rows_real pairs. touched: by local expert, whether it had rows.
/// intermediate: what this rank computes of each expert, all of it or a slice; `weights` may be of whole experts either way.
void add_expert_bytes(LayerReport& report, const LayerWeights& weights, const ExpertOptions& arithmetic, int intermediate,
                      const std::vector<bool>& touched);
/// What add_expert_bytes added where the activation is part of gemm1, as in the fused layer: gate and up never lie in memory.
void fuse_activation_bytes(LayerReport& report, int intermediate);

}  // namespace heddle
