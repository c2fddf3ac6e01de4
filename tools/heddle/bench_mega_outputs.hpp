// Outputs of a layer by rank, against each other.
#pragma once

#include <cstddef>
#include <vector>

#include "heddle/formats.hpp"

namespace heddle::tool {

using RankOutputs = std::vector<std::vector<bf16>>;  ///< [ranks][tokens * hidden]

/// Values whose bits differ.
std::size_t different(const RankOutputs& a, const RankOutputs& b);
/// |a - b| / |b| over all values; |a| where b is zeros.
double relative_error(const RankOutputs& a, const RankOutputs& b);

}  // namespace heddle::tool
