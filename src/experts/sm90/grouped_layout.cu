#include "experts/sm90/grouped_layout.hpp"

#include <algorithm>

#include "group/cuda_driver.hpp"

namespace heddle::sm90 {
namespace {

constexpr int threads_a_cta = 256;
constexpr int lanes = 32;
constexpr int warps_a_cta = threads_a_cta / lanes;

/// A thread a row: the first group that ends behind it, unless that begins behind it, too.
__global__ void __launch_bounds__(threads_a_cta) find_groups(const EndsCall call) {
  const int row = static_cast<int>(blockIdx.x) * threads_a_cta + static_cast<int>(threadIdx.x);
  if (row >= call.rows) return;
  int low = 0;
  int high = call.groups;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (call.ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const long long before = low == 0 ? 0 : max(call.ends[low - 1], 0);
  const long long begin = (before + call.alignment - 1) / call.alignment * call.alignment;
  call.group_of[row] = low < call.groups && row >= begin ? low : -1;
}

/// A warp a row.
__global__ void __launch_bounds__(threads_a_cta) zero_rows(const ZeroCall call) {
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int warp = static_cast<int>(threadIdx.x) / lanes;
  for (int row = static_cast<int>(blockIdx.x) * warps_a_cta + warp; row < call.rows;
       row += static_cast<int>(gridDim.x) * warps_a_cta) {
    const std::int32_t group = call.group_of[row];
    if (group >= 0 && group < call.groups) continue;
    bf16* to = call.values + static_cast<std::size_t>(row) * call.stride;
    for (int column = 8 * lane; column < call.columns; column += 8 * lanes) {
      *reinterpret_cast<uint4*>(to + column) = make_uint4(0, 0, 0, 0);
    }
  }
}

unsigned ctas_for(int rows, int rows_a_cta) { return static_cast<unsigned>((rows + rows_a_cta - 1) / rows_a_cta); }

}  // namespace

void launch_groups_of_ends(const EndsCall& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  find_groups<<<ctas_for(call.rows, threads_a_cta), threads_a_cta, 0, stream>>>(call);
  cuda::check(cudaGetLastError(), "launch of the kernel that finds the groups of rows");
}

void launch_zero_rows(const ZeroCall& call, int ctas, cudaStream_t stream) {
  if (call.rows == 0) return;
  const unsigned grid = std::min(ctas_for(call.rows, warps_a_cta), static_cast<unsigned>(ctas));
  zero_rows<<<grid, threads_a_cta, 0, stream>>>(call);
  cuda::check(cudaGetLastError(), "launch of the kernel that writes zeros to rows of no group");
}

void prepare_layouts() {
  for (const void* kernel : {reinterpret_cast<const void*>(&find_groups), reinterpret_cast<const void*>(&zero_rows)}) {
    cudaFuncAttributes attributes;
    cuda::check(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels of grouped layouts");
  }
}

}  // namespace heddle::sm90
