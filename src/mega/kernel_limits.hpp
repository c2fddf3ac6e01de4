// What the fused kernel for GPUs computes and holds. Known to the host engine, too: the choice of a way and `heddle verify` ask
// before there is a GPU.
#pragma once

#include <string>

#include "heddle/exchange.hpp"

namespace heddle {

namespace sm90 {
/// Counts, rows and row blocks of the experts in a CTA's memory: so many values at most, [local experts, ranks + 3]. All ranks have
/// fewer experts.
inline constexpr int most_mega_counts = 2560;
}  // namespace sm90

/// Is there a kernel for routed experts of one kind and a shared one of another? Without a shared expert the kinds are the same.
constexpr bool has_fused_kernel(WeightKind routed, WeightKind shared) {
  if (routed == WeightKind::mxfp4 && shared == WeightKind::fp8_block) return true;
  return routed == shared && (routed == WeightKind::bf16 || routed == WeightKind::fp8_block || routed == WeightKind::mxfp4);
}

/// Why the kernel does not take what check_mega lets pass, and what to take instead; empty: it takes it. `kind`: of the routed
/// experts' weights. The same on all ranks.
std::string refused_by_kernel(const ExchangeOptions& options, WeightKind kind);

}  // namespace heddle
