// Rows in the hands of a warp: copying and summing. The scalar rules are those of src/formats, compiled without
// contraction, so the bits are the host's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/group.hpp"
#include "signal/worker.hpp"

namespace heddle {

/// plain: rows are never in another format than bf16.
template <bool plain>
class WarpRows {
 public:
  static constexpr int lanes_of_warp = 32;
  static constexpr unsigned all_lanes = 0xFFFFFFFFu;

  /// Vectors [begin, end) of 16 bytes of one row to each of n places (null: left out), four a lane in flight.
  template <class To>
  __device__ static void copy(int lane, int n, To to, const std::byte* from, int begin, int end) {
    constexpr int ahead = 4;
    const auto* source = reinterpret_cast<const uint4*>(from);
    for (int at = begin + lane; at < end; at += ahead * lanes_of_warp) {
      uint4 values[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        if (at + j * lanes_of_warp < end) values[j] = source[at + j * lanes_of_warp];
      }
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        auto* place = reinterpret_cast<uint4*>(to(i));
        if (place == nullptr) continue;
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
          if (at + j * lanes_of_warp < end) place[at + j * lanes_of_warp] = values[j];
        }
      }
    }
  }

  /// out[begin, end) = bf16(sum over i < n of terms(i), in order, then last), eight columns a lane.
  template <class Terms>
  __device__ static void sum(int lane, bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int begin,
                             int end) {
    if constexpr (!plain) {
      if (format.row.wire != Wire::bf16) return sum_quantised(lane, out, n, terms, format, last, begin, end);
    }
    reduce<Wire::bf16>(lane, out, n, terms, format, last, begin, end);
  }

 private:
  /// Out of line: whoever sums bf16 rows need not step over it.
  template <class Terms>
  __device__ __noinline__ static void sum_quantised(int lane, bf16* out, int n, const Terms& terms, const SumFormat& format,
                                                    const LastTerm& last, int begin, int end) {
    if (format.row.wire == Wire::fp8) {
      reduce<Wire::fp8>(lane, out, n, terms, format, last, begin, end);
    } else {
      reduce<Wire::nvfp4>(lane, out, n, terms, format, last, begin, end);
    }
  }

  /// Eight values of a row, widened.
  struct Eight {
    float value[8];
  };
  template <Wire wire>
  __device__ static Eight load_eight(const std::byte* row, int at, const RowFormat& format) {
    Eight eight;
    if constexpr (wire == Wire::bf16) {
      const uint4 bits = *reinterpret_cast<const uint4*>(row + 2 * at);
      const std::uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) eight.value[j] = float_from_bits(j % 2 == 0 ? pairs[j / 2] << 16 : pairs[j / 2] & 0xFFFF0000u);
    } else if constexpr (wire == Wire::fp8) {
      const uint2 codes = *reinterpret_cast<const uint2*>(row + at);
      const std::byte* scales = row + format.scale_offset();
      const int group = at / format.quantisation.group;
      const float scale = format.quantisation.scale == ScaleFormat::ue8m0 ? from_ue8m0(static_cast<std::uint8_t>(scales[group]))
                                                                          : reinterpret_cast<const float*>(scales)[group];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        eight.value[j] = from_e4m3(static_cast<std::uint8_t>((j < 4 ? codes.x : codes.y) >> (8 * (j % 4)))) * scale;
      }
    } else {
      const std::uint32_t codes = *reinterpret_cast<const std::uint32_t*>(row + at / 2);
      const auto scale =
          static_cast<std::uint8_t>(row[format.scale_offset() + static_cast<std::size_t>(at / RowFormat::nvfp4_group)]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        eight.value[j] = nvfp4_value(static_cast<std::uint8_t>(codes >> (4 * j) & 0xF), scale, format.global_scale);
      }
    }
    return eight;
  }

  /// Two chunks of eight columns a lane, and of each the rows of several terms, are in flight together.
  template <Wire wire, class Terms>
  __device__ static void reduce(int lane, bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int begin,
                                int end) {
    constexpr int ahead = 4;
    constexpr int chunks = 2;
    constexpr int step = 8 * lanes_of_warp;
    for (int at = begin + 8 * lane; at < end; at += chunks * step) {
      float sums[chunks][8] = {};
      for (int first = 0; first < n; first += ahead) {
        SumTerm some[ahead];
        Eight values[chunks][ahead];
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
          some[j] = first + j < n ? terms(first + j) : SumTerm{};
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
            if (some[j].row != nullptr && at + c * step < end)
              values[c][j] = load_eight<wire>(some[j].row, at + c * step, format.row);
          }
        }
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
          if (some[j].row == nullptr) continue;
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              sums[c][i] = format.weighted ? __fmaf_rn(some[j].weight, values[c][j].value[i], sums[c][i])
                                           : sums[c][i] + values[c][j].value[i];
            }
          }
        }
      }
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (at + c * step < end) finish_chunk(out, at + c * step, sums[c], format, last);
      }
    }
  }
  __device__ static void finish_chunk(bf16* out, int at, float* sum, const SumFormat& format, const LastTerm& last) {
    if (last.row != nullptr) {
      const Eight shared = load_eight<Wire::bf16>(reinterpret_cast<const std::byte*>(last.row), at, format.row);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = sum[i] + __fmul_rn(last.factor, shared.value[i]);
    }
    store_eight(out + at, sum);
  }
  __device__ static void store_eight(bf16* out, const float* values) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = static_cast<std::uint32_t>(to_bf16(values[2 * j]).bits) |
                 static_cast<std::uint32_t>(to_bf16(values[2 * j + 1]).bits) << 16;
    }
    *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

}  // namespace heddle
