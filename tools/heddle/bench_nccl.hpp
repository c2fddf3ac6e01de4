// NCCL on the same rows: an all-gather of records (bf16 row, ids, weights), then a reduce-scatter of partial sums.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench_batch.hpp"

namespace heddle::tool {

/// Makes communicators with NVLink multicast left off, unless NCCL_NVLS_ENABLE says otherwise: the ways do not use it either.
std::shared_ptr<NcclCommunicators> make_communicators(const Lanes& lanes);

struct NcclTimes {
  std::vector<double> round_trips;  ///< microseconds, of the slower GPU, one sample a replay
  std::vector<double> dispatch, combine;
  std::string failed;  ///< why there are none
};

/// Graph replays with plain memory or with memory in a window that NCCL's kernels reach into directly. The record is taken to
/// lie ready: no kernel packs it, none lists what arrived. One rank a GPU. Throws Error if NCCL does not come to an end.
NcclTimes time_nccl(NcclCommunicators& communicators, Lanes& lanes, const Batch& batch, int tokens, int round_trips, int replays,
                    bool symmetric);

}  // namespace heddle::tool
