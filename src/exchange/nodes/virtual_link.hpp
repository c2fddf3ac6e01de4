// Swaps between virtual nodes on one GPU: a small kernel offers what it has, takes what its peers offer, and leaves when they have
// taken theirs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "signal/words.hpp"

namespace heddle {

/// Of a pair of ranks, one way: what is offered, in which turn, and the last turn in which it was taken.
struct SwapSlot {
  Word offered = 0;
  Word taken = 0;
  const void* from = nullptr;
};

struct SwapCall {
  struct Entry {
    SwapSlot* mine = nullptr;
    SwapSlot* theirs = nullptr;
    const void* from = nullptr;
    void* to = nullptr;
    std::size_t bytes = 0;
  };
  static constexpr int most = 512;  ///< kernels have so much room for their parameters

  Word* turns = nullptr;       ///< made by this node so far
  const Word* stop = nullptr;  ///< mapped host memory: 1 ends all waits
  int count = 0;
  Entry entries[most];
};

cudaError_t load_swap_kernel();
cudaError_t launch_swaps(const SwapCall& call, cudaStream_t stream);

}  // namespace heddle
