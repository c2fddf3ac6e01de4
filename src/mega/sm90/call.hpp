// What the fused kernel is given: one source for host and device. By value what all ranks of a GPU share; in memory of the GPU what
// each of them has for itself.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "experts/sm90/call.hpp"
#include "experts/sm90/weight_order.hpp"
#include "mega/kernel_limits.hpp"
#include "mega/protocol.hpp"

namespace heddle::sm90 {

/// A task reads one of four matrices, and rows of one of four regions.
enum class MegaSource : std::uint8_t { gemm1, gemm2, shared_gemm1, shared_gemm2 };
inline constexpr int mega_sources = 4;

/// What the roles of a CTA know, alike in all CTAs of a rank and from call to call: the host works it out once, and CTAs copy it
/// into their shared memory as it is.
struct MegaKnown {
  MegaCall call;                 ///< but for what is a call's or a CTA's own: input and scratch
  ActivatedStore activated[2];   ///< where GEMM 1 leaves activations: of routed experts, of the shared one
  TokenRows rows[mega_sources];  ///< where tasks find token scales
  OrderedMatrix weights[mega_sources];
};

/// What one rank keeps from call to call, in memory of the GPU.
struct MegaRank {
  RowTensor rows[mega_sources];  ///< arrived ring, intermediate ring; input region, the shared expert's activations
  MegaKnown known;
};

/// The launches around it, by all warps of a CTA: before, a rank's tokens into its input region, and their announcement; behind,
/// the sums of their slots.
struct MegaAnnounceCall : DeviceCall {
  MegaLayout layout;
};
const void* mega_announce_kernel();
/// Of slots in the format of `returned`.
const void* mega_sum_kernel(Wire returned);

struct MegaKernelCall : DeviceCall {
  MegaLayout layout;
  const MegaRank* parts = nullptr;  ///< [local ranks]
  TokenScales scaling = TokenScales::none;
};

}  // namespace heddle::sm90
