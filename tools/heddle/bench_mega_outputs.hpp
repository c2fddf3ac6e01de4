// Outputs of a layer by rank, against each other.
#pragma once

#include <cstddef>
#include <vector>

#include "bench_batch.hpp"
#include "heddle/formats.hpp"

namespace heddle::tool {

using RankOutputs = std::vector<std::vector<bf16>>;  ///< [ranks][tokens * hidden]

/// Of a batch's first `tokens` tokens a rank, as the last call left them.
RankOutputs outputs_of(const Batch& batch, int tokens);
/// Values whose bits differ.
std::size_t different(const RankOutputs& a, const RankOutputs& b);
/// |a - b| / |b| over all values; |a| where b is zeros.
double relative_error(const RankOutputs& a, const RankOutputs& b);

}  // namespace heddle::tool
