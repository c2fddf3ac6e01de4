// Rows into the format of a product's operand: a warp takes 1024 columns of a row at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "experts/activation/flat_list.hpp"
#include "experts/activation/group.cuh"
#include "experts/sm90/launch.hpp"
#include "experts/sm90/rows.hpp"
#include "experts/sm90/scan.cuh"
#include "formats/group.hpp"
#include "signal/ptx.cuh"

namespace heddle::sm90 {

__device__ inline int tokens_of(const TokenCount& tokens) {
  return tokens.here != nullptr ? min(max(*tokens.here, 0), tokens.most) : tokens.most;
}

__device__ inline bool is_own(std::int32_t id, int experts) { return id >= 0 && id < experts; }

namespace rows {

inline constexpr int threads_a_cta = 256;
inline constexpr int warps_a_cta = threads_a_cta / warp_threads;
inline constexpr int lane_columns = 8;
inline constexpr int warp_columns = warp_threads * lane_columns;
inline constexpr int passes = 4;  ///< loads of a lane that are under way together
inline constexpr int item_columns = passes * warp_columns;

HEDDLE_HOST_DEVICE constexpr int items_of_row(RowChange change, int columns) {
  return change == RowChange::none ? 1 : (columns + item_columns - 1) / item_columns;
}

/// Eight e4m3 codes; and as bf16 values.
__device__ inline uint4 widened(const uint2& codes) {
  const auto pair = [](std::uint32_t two) {
    return float_bits(from_e4m3(static_cast<std::uint8_t>(two))) >> 16 |
           (float_bits(from_e4m3(static_cast<std::uint8_t>(two >> 8))) & 0xFFFF0000u);
  };
  return make_uint4(pair(codes.x), pair(codes.x >> 16), pair(codes.y), pair(codes.y >> 16));
}

/// The largest magnitude of a group over the lanes that hold it: 16 of 128 values, 4 of 32.
__device__ inline float largest_of_lanes(float largest, int group) {
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, lanes);
    if (lane_columns * lanes < group) largest = fmaxf(largest, other);
  }
  return largest;
}

/// A scale by the rules, and the codes it makes.
template <ScaleFormat format>
struct Scale;
template <>
struct Scale<ScaleFormat::ue8m0> : GroupScale<ScaleFormat::ue8m0> {
  __device__ explicit Scale(float largest) : GroupScale(of(largest)) {}
  __device__ void store(std::byte* scales, int group) const { scales[group] = static_cast<std::byte>(byte); }
};
template <>
struct Scale<ScaleFormat::f32> {
  float scale;
  __device__ explicit Scale(float largest)
      : scale(fp8_scale(group_amax(static_cast<std::int32_t>(float_bits(largest))), ScaleFormat::f32)) {}
  __device__ float quotient(float value) const { return __fdiv_rn(value, scale); }
  __device__ void store(std::byte* scales, int group) const { reinterpret_cast<float*>(scales)[group] = scale; }
};

/// One lane's share of a row.
template <RowChange change, ScaleFormat format>
class RowPart {
 public:
  __device__ RowPart(const RowsCall& call, std::size_t from, std::size_t to)
      : call_(call),
        values_(call.values + from * call.value_stride),
        scales_(call.scales + from * call.scale_stride),
        to_(call.to + to * call.to_stride),
        to_scales_(call.to_scales == nullptr ? nullptr : call.to_scales + to * call.to_scale_stride) {}

  /// Columns [begin, begin + item_columns) of the row, by a whole warp.
  __device__ void convert(int begin) const {
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    Raw raw[passes] = {};
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int column = begin + pass * warp_columns + lane * lane_columns;
      if (column < call_.columns) raw[pass] = *reinterpret_cast<const Raw*>(values_ + column * raw_bytes);
    }
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      if (begin + pass * warp_columns >= call_.columns) return;  // the whole warp
      convert_eight(raw[pass], begin + pass * warp_columns + lane * lane_columns);
    }
  }

 private:
  static constexpr bool widens = change == RowChange::widen;
  static constexpr int raw_bytes = widens ? 1 : 2;
  using Raw = std::conditional_t<widens, uint2, uint4>;

  __device__ void convert_eight(const Raw& raw, int column) const {
    const bool there = column < call_.columns;
    const bool speaks = there && column % call_.quantisation.group == 0;
    const int group = column / call_.quantisation.group;
    if constexpr (widens) {
      if (there) store(column, raw);
      if (speaks && to_scales_ != nullptr) copy_scale(group);
    } else {
      float values[8];
      const std::uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
      heddle::detail::widen_pairs(pairs, values);
      float largest = 0.0f;
#pragma unroll
      for (float value : values) largest = largest_magnitude(largest, value);
      const Scale<format> scale(largest_of_lanes(largest, call_.quantisation.group));
      const auto four = [&](int i) {
        return ptx::to_e4m3_pair(scale.quotient(values[i]), scale.quotient(values[i + 1])) |
               ptx::to_e4m3_pair(scale.quotient(values[i + 2]), scale.quotient(values[i + 3])) << 16;
      };
      const uint2 codes = make_uint2(four(0), four(4));
      if (there) store(column, codes);
      if (speaks) scale.store(to_scales_, group);
    }
  }
  __device__ void store(int column, const uint2& codes) const {
    if constexpr (change == RowChange::quantise) {
      *reinterpret_cast<uint2*>(to_ + column) = codes;
    } else {
      *reinterpret_cast<uint4*>(to_ + 2 * column) = widened(codes);
    }
  }
  __device__ void copy_scale(int group) const {
    if constexpr (format == ScaleFormat::ue8m0) {
      to_scales_[group] = scales_[group];
    } else {
      reinterpret_cast<float*>(to_scales_)[group] = reinterpret_cast<const float*>(scales_)[group];
    }
  }

  const RowsCall& call_;
  const std::byte* values_;
  const std::byte* scales_;
  std::byte* to_;
  std::byte* to_scales_;
};

/// Where the rows of all experts end, in shared memory. By all threads. Returns the number of rows.
__device__ inline int list_rows(const RowsCall& call, int* row_end) {
  if (threadIdx.x < warp_threads) {
    scan_rows(call.counts, call.experts, call.limits, [&](int expert, int begin, int end) {
      if (expert >= call.experts) return;
      row_end[expert] = end;
      if (blockIdx.x == 0 && call.flat_counts != nullptr) call.flat_counts[expert] = end - begin;
    });
  }
  __syncthreads();
  return call.experts == 0 ? 0 : row_end[call.experts - 1];
}

__device__ inline bool has_own_expert(const RowsCall& call, int token) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  bool own = false;
  for (int choice = lane; choice < call.topk; choice += warp_threads) {
    own |=
        is_own(call.ids[static_cast<std::size_t>(token) * static_cast<std::size_t>(call.topk) + static_cast<std::size_t>(choice)],
               call.experts);
  }
  return __any_sync(0xFFFFFFFFu, own);
}

template <RowChange change, ScaleFormat format>
__global__ void __launch_bounds__(threads_a_cta) change_rows(const __grid_constant__ RowsCall call) {
  __shared__ int row_end[most_experts];
  const int rows = call.ids != nullptr ? tokens_of(call.tokens) : list_rows(call, row_end);
  const int warp = static_cast<int>(threadIdx.x) / warp_threads;
  const bool speaks = threadIdx.x % warp_threads == 0;
  const int items_a_row = items_of_row(change, call.columns);
  const int items = rows * items_a_row;
  for (int item = static_cast<int>(blockIdx.x) * warps_a_cta + warp; item < items;
       item += static_cast<int>(gridDim.x) * warps_a_cta) {
    const int row = item / items_a_row;
    const int part = item % items_a_row;
    auto from = static_cast<std::size_t>(row);
    if (call.ids != nullptr) {
      if (!has_own_expert(call, row)) continue;
    } else {
      const FlatRow found = find_row(row_end, call.experts, row);
      from = call.map.place({found.expert, 0, found.row, 1, found.flat}, 0);
      if (part == 0 && speaks && call.flat_weights != nullptr) {
        call.flat_weights[row] = call.weights != nullptr ? call.weights[from] : 1.0f;
      }
    }
    if constexpr (change != RowChange::none) {
      RowPart<change, format>(call, from, static_cast<std::size_t>(row)).convert(part * item_columns);
    }
  }
}

}  // namespace rows

}  // namespace heddle::sm90
