// What the kernels of routed calls share.
#pragma once

#include <cstdint>

#include "experts/sm90/rows.hpp"

namespace heddle::sm90 {

__device__ inline int tokens_of(const TokenCount& tokens) {
  return tokens.here != nullptr ? min(max(*tokens.here, 0), tokens.most) : tokens.most;
}

__device__ inline bool is_own(std::int32_t id, int experts) { return id >= 0 && id < experts; }

}  // namespace heddle::sm90
