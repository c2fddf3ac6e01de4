// Routed calls: pairs listed by expert before the products, summed by token behind them.
#pragma once

#include <cstdint>

#include "experts/activation/group.cuh"
#include "experts/sm90/rows.cuh"
#include "experts/sm90/rows.hpp"
#include "experts/sm90/tile.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90::routed {

inline constexpr unsigned all_lanes = 0xFFFFFFFFu;
inline constexpr int most_list_warps = 32;

/// Calls each(pair, id) for pairs [begin, end), 32 at a time and by all lanes together, four loads under way; id is -1 behind them.
template <class Each>
__device__ void for_pairs(const std::int32_t* ids, int begin, int end, const Each& each) {
  constexpr int ahead = 4;
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  for (int base = begin; base < end; base += ahead * warp_threads) {
    std::int32_t id[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const int pair = base + i * warp_threads + lane;
      id[i] = pair < end ? ids[pair] : -1;
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) each(base + i * warp_threads + lane, id[i]);
  }
}

/// A CTA an expert. Each warp has a segment of the pairs: it counts those of this expert and of lower ones, and when all have
/// counted it knows where its own begin. No atomics: the order is that of the pairs.
__global__ inline void __launch_bounds__(most_list_warps* warp_threads) list_pairs(const __grid_constant__ ListCall call) {
  __shared__ int own_of[most_list_warps];
  __shared__ int lower_of[most_list_warps];
  ptx::let_next_kernel_launch();
  const int expert = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  const int warp = static_cast<int>(threadIdx.x) / warp_threads;
  const int warps = static_cast<int>(blockDim.x) / warp_threads;
  const int pairs = tokens_of(call.tokens) * call.topk;
  const int segment = (pairs + warps * warp_threads - 1) / (warps * warp_threads) * warp_threads;
  const int begin = min(warp * segment, pairs);
  const int end = min(begin + segment, pairs);

  int own = 0;
  int lower = 0;
  for_pairs(call.ids, begin, end, [&](int, std::int32_t id) {
    own += __popc(__ballot_sync(all_lanes, id == expert));
    lower += __popc(__ballot_sync(all_lanes, id >= 0 && id < expert));
  });
  if (lane == 0) {
    own_of[warp] = own;
    lower_of[warp] = lower;
  }
  __syncthreads();
  int all = 0;
  int place = 0;
  for (int other = 0; other < warps; ++other) {
    place += lower_of[other] + (other < warp ? own_of[other] : 0);
    all += own_of[other];
  }
  if (threadIdx.x == 0) call.counts[expert] = all;
  if (own == 0) return;
  for_pairs(call.ids, begin, end, [&](int pair, std::int32_t id) {
    const unsigned same = __ballot_sync(all_lanes, id == expert);
    if (id == expert) {
      const int at = place + __popc(same & ((1u << lane) - 1));
      call.place_of[pair] = at;
      if (at < call.most_rows) {
        call.token_of[at] = pair / call.topk;
        call.pair_of[at] = pair;
        if (call.weight_of != nullptr) call.weight_of[at] = call.weights != nullptr ? call.weights[pair] : 1.0f;
      }
    }
    place += __popc(same);
  });
}

inline constexpr int sum_threads = 256;
inline constexpr int sum_warps = sum_threads / warp_threads;
inline constexpr int lane_columns = 8;
inline constexpr int warp_columns = warp_threads * lane_columns;

/// Adds the rows of the lanes in `mask`, lowest lane first, four rows under way.
__device__ inline void add_rows(const SumCall& call, unsigned mask, int place, float weight, int column,
                                float (&sum)[lane_columns]) {
  constexpr int ahead = 4;
  const bool there = column < call.columns;
  while (mask != 0) {
    uint4 raw[ahead] = {};
    float factor[ahead];
    bool any[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      any[i] = mask != 0;
      const int lane = any[i] ? __ffs(static_cast<int>(mask)) - 1 : 0;
      mask &= mask - 1;
      const auto row = static_cast<std::size_t>(__shfl_sync(all_lanes, place, lane));
      factor[i] = __shfl_sync(all_lanes, weight, lane);
      if (any[i] && there) {
        raw[i] = *reinterpret_cast<const uint4*>(call.results + row * static_cast<std::size_t>(call.columns) + column);
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (!any[i]) break;
      const std::uint32_t pairs[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
      float values[lane_columns];
      heddle::detail::widen_pairs(pairs, values);
#pragma unroll
      for (int v = 0; v < lane_columns; ++v) sum[v] = __fmaf_rn(factor[i], values[v], sum[v]);
    }
  }
}

/// A warp takes 256 columns of a token at a time.
__global__ inline void __launch_bounds__(sum_threads) sum_pairs(const __grid_constant__ SumCall call) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  const int warp = static_cast<int>(threadIdx.x) / warp_threads;
  const int items_a_token = (call.columns + warp_columns - 1) / warp_columns;
  const int items = tokens_of(call.tokens) * items_a_token;
  for (int item = static_cast<int>(blockIdx.x) * sum_warps + warp; item < items; item += static_cast<int>(gridDim.x) * sum_warps) {
    const int token = item / items_a_token;
    const int column = item % items_a_token * warp_columns + lane * lane_columns;
    float sum[lane_columns] = {};
    for (int first = 0; first < call.topk; first += warp_threads) {
      bool own = false;
      int place = 0;
      float weight = 1.0f;
      if (first + lane < call.topk) {
        const int pair = token * call.topk + first + lane;
        own = is_own(call.ids[pair], call.experts);
        if (own) place = call.place_of[pair];
        own = own && place < call.most_rows;
        if (own && call.weights != nullptr) weight = call.weights[pair];
      }
      add_rows(call, __ballot_sync(all_lanes, own), place, weight, column, sum);
    }
    if (column < call.columns) {
      *reinterpret_cast<uint4*>(call.out + static_cast<std::size_t>(token) * call.stride + column) =
          make_uint4(ptx::to_bf16_pair(sum[0], sum[1]), ptx::to_bf16_pair(sum[2], sum[3]), ptx::to_bf16_pair(sum[4], sum[5]),
                     ptx::to_bf16_pair(sum[6], sum[7]));
    }
  }
}

}  // namespace heddle::sm90::routed
