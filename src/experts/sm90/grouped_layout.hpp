// The layouts of grouped products that are not the engine's own: which group each row is of, and zeros in the rows of none.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle::sm90 {

/// Groups that lie one behind another: group g ends before row ends[g] and begins where the one before it ends, up to the next
/// multiple of the alignment; one that ends where the one before it does, or before its begin, is empty.
struct EndsCall {
  const std::int32_t* ends = nullptr;  ///< [groups], ascending, device memory
  int groups = 0;
  int alignment = 1;
  int rows = 0;
  std::int32_t* group_of = nullptr;  ///< [rows]: the group, -1: none
};

/// Queues it on the current device. Whatever ends are found, every row gets -1 or a group that there is. May be captured.
void launch_groups_of_ends(const EndsCall& call, cudaStream_t stream);

/// Rows of results that belong to no group.
struct ZeroCall {
  const std::int32_t* group_of = nullptr;  ///< [rows], others than 0 .. groups - 1: none
  int groups = 0;
  int rows = 0;
  bf16* values = nullptr;  ///< at a multiple of 16 bytes
  std::size_t stride = 0;  ///< values, a multiple of 8
  int columns = 0;         ///< a multiple of 8
};

/// Queues the writing of zeros there, with at most `ctas` CTAs. May be captured.
void launch_zero_rows(const ZeroCall& call, int ctas, cudaStream_t stream);

/// Loads these kernels on the current device.
void prepare_layouts();

}  // namespace heddle::sm90
