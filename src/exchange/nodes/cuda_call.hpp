// elastic on GPUs of several nodes: what its kernels are given, and what the host sees of them while they run.
#pragma once

#include "exchange/elastic/cuda_exchange.hpp"
#include "exchange/nodes/batch.hpp"

namespace heddle {

/// Of one rank, in mapped host memory: the swap that the rank has come to last, and the last one that is over; twice the epoch of
/// their call, and one more where it is of results.
struct NodeProgress {
  Word begun = 0;
  Word ended = 0;
};

struct NodesCall : ElasticCall {
  BatchLayout batches;
  BatchMail mail;  ///< of the first local rank
  std::size_t mail_stride = 0;
  NodeProgress* progress = nullptr;  ///< [local ranks]
};

enum class NodesKernel { send, receive, give_back, hear, collect };
const void* nodes_kernel(NodesKernel which);
/// Between those, ahead of a swap: writes the heads of what goes, this rank's fault in them if it has met one.
cudaError_t load_head_kernel();
cudaError_t launch_heads(const NodesCall& call, int local_ranks, bool results, cudaStream_t stream);

}  // namespace heddle
