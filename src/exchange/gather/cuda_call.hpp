// What gather's kernels are given.
#pragma once

#include "exchange/cuda_exchange.hpp"
#include "exchange/gather/tagged.hpp"

namespace heddle {

struct GatherCall : DeviceCall {
  GatherLayout layout;
  GatherTagged tagged;
  GatherMode mode = GatherMode::padded;
  // Scratch of the first local rank.
  std::int32_t* counts = nullptr;  ///< [ranks]
  ArrivedRouting routing;
  const std::byte* zeros = nullptr;  ///< a record
  std::byte* sums = nullptr;         ///< a record a worker
  std::byte* own_rows = nullptr;     ///< tensor_parallel: [ranks * cap] wire rows
  bf16* slices = nullptr;            ///< tensor_parallel: [ranks * cap, H], sums of this rank's slice of the batch
};

/// Few tokens, whose rows travel with the flag beside the data.
const void* tagged_gather_dispatch();
const void* tagged_gather_combine();

}  // namespace heddle
