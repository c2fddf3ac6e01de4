// Prefix sums of the experts' rows, limited, for every kernel that works through rows of experts.
#pragma once

#include "experts/sm90/call.hpp"
#include "experts/sm90/tile.hpp"

namespace heddle::sm90 {

/// Inclusive prefix sum over a warp.
__device__ inline int warp_prefix_sum(int value) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
#pragma unroll
  for (int distance = 1; distance < warp_threads; distance *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFu, value, static_cast<unsigned>(distance));
    if (lane >= distance) value += before;
  }
  return value;
}

/// Calls each(expert, begin, end) with the flat rows of every expert, by all lanes together: those behind the last expert have an
/// empty one. By one warp. Returns the number of rows. The first CTA reports an expert whose count was not taken as it is.
template <class Each>
__device__ int scan_rows(const int* counts, int experts, const RowLimits& limits, const Each& each) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  int before = 0;
  for (int first = 0; first < experts; first += warp_threads) {
    const int expert = first + lane;
    int wanted = 0;
    if (expert < experts) wanted = counts != nullptr ? counts[expert] : limits.an_expert;
    const int end = min(before + warp_prefix_sum(min(max(wanted, 0), limits.an_expert)), limits.all);
    int begin = __shfl_up_sync(0xFFFFFFFFu, end, 1);
    if (lane == 0) begin = before;
    const bool refused = limits.refused != nullptr && blockIdx.x == 0 && end - begin != wanted;
    if (refused) *limits.refused = RefusedCount::pack(limits.first_expert + expert, wanted);
    each(expert, begin, end);
    before = __shfl_sync(0xFFFFFFFFu, end, warp_threads - 1);
  }
  return before;
}

}  // namespace heddle::sm90
