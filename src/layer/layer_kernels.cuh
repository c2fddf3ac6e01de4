// The small kernels of a layer: rows widened where they arrive, runs limited, the shared expert's gate. In a header, so that the
// emulator can run them (tests/emulator_layer_test.cpp).
#pragma once

#include "layer/layer_kernels.hpp"
#include "signal/device_rows.cuh"

namespace heddle::layer_kernels {

inline constexpr int threads = 256;
inline constexpr int lanes = 32;
inline constexpr int warps_a_cta = threads / lanes;
inline constexpr int lane_columns = 8;
inline constexpr int warp_columns = lanes * lane_columns;
inline constexpr unsigned all_lanes = 0xFFFFFFFFu;

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % lanes; }
__device__ inline int warp_of_grid() { return static_cast<int>(blockIdx.x) * warps_a_cta + static_cast<int>(threadIdx.x) / lanes; }
__device__ inline int warps_of_grid() { return static_cast<int>(gridDim.x) * warps_a_cta; }

/// One row by a warp, eight columns a lane.
template <Wire wire>
__device__ void widen_row(const WidenCall& call, int row) {
  const std::byte* from = call.rows + static_cast<std::size_t>(row) * call.row_stride;
  bf16* to = call.to + static_cast<std::size_t>(row) * static_cast<std::size_t>(call.wire.hidden);
  for (int at = lane_of_thread() * lane_columns; at < call.wire.hidden; at += warp_columns) {
    RawEight<wire> raw;
    raw.load(from, at, call.wire);
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = ptx::to_bf16_pair(raw.value(2 * i, call.wire), raw.value(2 * i + 1, call.wire));
    *reinterpret_cast<uint4*>(to + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

/// A row of CTAs an expert.
template <Wire wire>
__global__ void __launch_bounds__(threads) widen_by_expert(const __grid_constant__ WidenCall call) {
  const int begin = call.begins[blockIdx.y];
  const int count = call.counts[blockIdx.y];
  for (int i = warp_of_grid(); i < count; i += warps_of_grid()) {
    const int row = begin + i;
    if (row < 0 || row >= call.room) return;  // of a call that was given up
    widen_row<wire>(call, row);
  }
}

template <Wire wire>
__global__ void __launch_bounds__(threads) widen_routed(const __grid_constant__ WidenCall call) {
  for (int row = warp_of_grid(); row < call.room; row += warps_of_grid()) {
    bool own = false;
    for (int choice = lane_of_thread(); choice < call.topk; choice += lanes) {
      own |= call.local_ids[static_cast<std::ptrdiff_t>(row) * call.topk + choice] >= 0;
    }
    if (__any_sync(all_lanes, own)) widen_row<wire>(call, row);
  }
}

__global__ inline void __launch_bounds__(threads) limit_runs(const __grid_constant__ RunsCall call) {
  const int expert = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (expert >= call.experts) return;
  const std::int32_t begin = call.begins[expert];
  const std::int32_t count = call.counts[expert];
  const bool inside = begin >= 0 && count >= 0 && begin <= call.room && count <= call.room - begin;
  call.begins_out[expert] = inside ? begin : 0;
  call.counts_out[expert] = inside ? count : 0;
}

/// A warp a token.
__global__ inline void __launch_bounds__(threads) gate_tokens(const __grid_constant__ GateCall call) {
  const int tokens = min(*call.tokens, call.most_tokens);
  for (int token = warp_of_grid(); token < tokens; token += warps_of_grid()) {
    const auto* row = reinterpret_cast<const std::byte*>(call.hidden + static_cast<std::size_t>(token) *
                                                                           static_cast<std::size_t>(call.hidden_size));
    const RowFormat plain{Wire::bf16, call.hidden_size, {}, 1.0f};
    float sum = 0.0f;
    for (int at = lane_of_thread() * lane_columns; at < call.hidden_size; at += warp_columns) {
      RawEight<Wire::bf16> raw;
      raw.load(row, at, plain);
#pragma unroll
      for (int i = 0; i < lane_columns; ++i) sum = __fmaf_rn(call.gate[at + i], raw.value(i, plain), sum);
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(all_lanes, sum, distance);
    if (lane_of_thread() == 0) call.factors[token] = __fdiv_rn(1.0f, 1.0f + expf(-sum));
  }
}

__global__ inline void store_numbers(const __grid_constant__ NumbersCall call) {
  if (static_cast<int>(threadIdx.x) < call.count) call.to[threadIdx.x] = call.values[threadIdx.x];
}

__global__ inline void count_pass(const __grid_constant__ PassCall call) {
  if (static_cast<int>(threadIdx.x) >= call.count) return;
  const int tokens = *call.tokens[threadIdx.x];
  const int left = max(tokens - call.first, 0);
  call.to[threadIdx.x] = tokens < 0 ? tokens : call.last ? left : min(left, call.most);
}

}  // namespace heddle::layer_kernels
