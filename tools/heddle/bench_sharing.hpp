// How two batches in flight share the SMs of a GPU so that neither can wait for ever for the other.
//
// CTAs that wait for another GPU sit on their SMs. If those of both batches did not fit side by side, GPU 0 could be full of one
// batch's and GPU 1 of the other's, and both would wait. Here each batch's waiting kernels have at most half of the SMs, and only
// one of them is there at a time (with a share none is launched ahead of the kernel before it). Products wait for nobody: those
// that keep SMs leave them. So whichever batch a GPU begins with, there is room for the other one's waiting kernel in the end.
#pragma once

#include <optional>

namespace heddle::tool {

/// Of one batch; 0: all SMs, as the library has it.
struct SmShare {
  int exchange = 0;  ///< CTAs a GPU of the kernels that wait for other GPUs, over all its ranks; of the fused layer all there are
  int products = 0;  ///< CTAs of the products, of chains
};

/// `waits_with_products`: the fused layer, whose one kernel does both, or a way that may be it: half of the SMs each. A chain's
/// exchange has `asked`, by default a quarter of the SMs, and its products have the others. Throws InputError if two exchanges of
/// `asked` do not fit side by side, or if ranks of a GPU are more than its share: each needs a CTA.
SmShare share_of_two(bool waits_with_products, int sms, int ranks_a_gpu, std::optional<int> asked);

}  // namespace heddle::tool
