// The choice of copies on a GPU. Launches for code that is not compiled for a device; they allocate nothing and may be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "heddle/balancing.hpp"

namespace heddle {

/// What the kernel has room for in shared memory.
inline constexpr int most_balanced_experts = 512;
inline constexpr int most_balanced_copies = 1024;
inline constexpr int most_balanced_ranks = 256;

/// A ReplicaMap in device memory.
struct CopiesTable {
  int experts = 0, physical = 0, ranks = 0;
  const int* begins = nullptr;    ///< [experts + 1]
  const int* copies = nullptr;    ///< [physical]: ids of copies, an expert's from begins[e] on
  const int* ranks_of = nullptr;  ///< [physical]: where copies[i] lives
  const int* several = nullptr;   ///< [experts]: those with several copies in ascending id, first of all how many: [1 + experts]
};

/// One rank's pairs, as choose_copies has them.
struct CopiesCall {
  CopiesTable table;
  CopyRule rule = CopyRule::levelled;
  int source = 0;
  const std::int32_t* ids = nullptr;  ///< [most_tokens, topk]
  const int* tokens = nullptr;        ///< on the device; what is beyond most_tokens is left alone
  int most_tokens = 0;
  int topk = 0;
  /// [most_tokens, topk]. Ids that are none, or repeat within a token, become table.physical, which no exchange takes: the fault is
  /// the dispatch's to raise.
  std::int32_t* chosen = nullptr;
  unsigned long long* counts = nullptr;  ///< [experts], added to; or null
};
/// One CTA.
void launch_copies(const CopiesCall& call, cudaStream_t stream);

/// Loads the kernel on the current device.
void prepare_copies_kernel();

}  // namespace heddle
