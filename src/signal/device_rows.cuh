// Rows in the hands of a warp: copying and summing. The scalar rules are those of src/formats, compiled without
// contraction, so the bits are the host's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/group.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"

namespace heddle {

/// Vectors [begin, end) of 16 bytes of one row to each of n places (null: left out), four a lane in flight. All lanes ask
/// for places alike.
template <class To>
__device__ inline void copy_vectors(int lane, int n, To to, const std::byte* from, int begin, int end) {
  constexpr int lanes_of_warp = 32;
  constexpr int ahead = 4;
  const auto* source = reinterpret_cast<const uint4*>(from);
#pragma unroll 1
  for (int base = begin; base < end; base += ahead * lanes_of_warp) {
    const int at = base + lane;
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

/// Eight values of a row as they lie in memory, with what they are multiplied by: loaded first and widened later, so that
/// many loads are on their way together.
template <Wire wire>
struct RawEight;

template <>
struct RawEight<Wire::bf16> {
  uint4 bits;
  __device__ void load(const std::byte* row, int at, const RowFormat&) { bits = *reinterpret_cast<const uint4*>(row + 2 * at); }
  __device__ float value(int i, const RowFormat&) const {
    const std::uint32_t pair = i / 2 == 0 ? bits.x : (i / 2 == 1 ? bits.y : (i / 2 == 2 ? bits.z : bits.w));
    return float_from_bits(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
  }
};

template <>
struct RawEight<Wire::fp8> {
  uint2 codes;
  std::uint32_t scale;  ///< as stored
  __device__ void load(const std::byte* row, int at, const RowFormat& format) {
    codes = *reinterpret_cast<const uint2*>(row + at);
    const std::byte* scales = row + format.scale_offset();
    const int group = at / format.quantisation.group;
    scale = format.quantisation.scale == ScaleFormat::ue8m0 ? static_cast<std::uint32_t>(scales[group])
                                                            : reinterpret_cast<const std::uint32_t*>(scales)[group];
  }
  __device__ float value(int i, const RowFormat& format) const {
    const float factor =
        format.quantisation.scale == ScaleFormat::ue8m0 ? from_ue8m0(static_cast<std::uint8_t>(scale)) : float_from_bits(scale);
    return from_e4m3(static_cast<std::uint8_t>((i < 4 ? codes.x : codes.y) >> (8 * (i % 4)))) * factor;
  }
};

template <>
struct RawEight<Wire::nvfp4> {
  std::uint32_t codes;
  std::uint8_t scale;
  __device__ void load(const std::byte* row, int at, const RowFormat& format) {
    codes = *reinterpret_cast<const std::uint32_t*>(row + at / 2);
    scale = static_cast<std::uint8_t>(row[format.scale_offset() + static_cast<std::size_t>(at / RowFormat::nvfp4_group)]);
  }
  __device__ float value(int i, const RowFormat& format) const {
    return nvfp4_value(static_cast<std::uint8_t>(codes >> (4 * i) & 0xF), scale, format.global_scale);
  }
};

/// plain: rows are never in another format than bf16.
template <bool plain>
class RowSum {
 public:
  static constexpr int lanes_of_warp = 32;

  /// out[begin, end) = bf16(sum over i < n of terms(i), in order, then last), eight columns a lane. terms is called by all
  /// lanes alike.
  template <class Terms>
  __device__ static void sum(int lane, bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int begin,
                             int end) {
    if constexpr (!plain) {
      if (format.row.wire != Wire::bf16) return sum_quantised(lane, out, n, terms, format, last, begin, end);
    }
    // Few terms: more columns in flight; many: more terms.
    if (n <= 2) {
      reduce<Wire::bf16, 2, 2>(lane, out, n, terms, format, last, begin, end);
    } else if (n <= 4) {
      reduce<Wire::bf16, 4, 2>(lane, out, n, terms, format, last, begin, end);
    } else {
      reduce<Wire::bf16, 8, 1>(lane, out, n, terms, format, last, begin, end);
    }
  }

  /// The last term, and the only rounding, of eight columns.
  __device__ static void finish_chunk(bf16* out, int at, float* sum, const SumFormat& format, const LastTerm& last) {
    if (last.row != nullptr) {
      RawEight<Wire::bf16> shared;
      shared.load(reinterpret_cast<const std::byte*>(last.row), at, format.row);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = sum[i] + __fmul_rn(last.factor, shared.value(i, format.row));
    }
    store_eight(out + at, sum);
  }

 private:
  /// Out of line: whoever sums bf16 rows need not step over it.
  template <class Terms>
  __device__ __noinline__ static void sum_quantised(int lane, bf16* out, int n, const Terms& terms, const SumFormat& format,
                                                    const LastTerm& last, int begin, int end) {
    if (format.row.wire == Wire::fp8) {
      reduce<Wire::fp8, 4, 1>(lane, out, n, terms, format, last, begin, end);
    } else {
      reduce<Wire::nvfp4, 4, 1>(lane, out, n, terms, format, last, begin, end);
    }
  }

  /// `ahead` terms and `chunks` of eight columns a lane are in flight together.
  template <Wire wire, int ahead, int chunks, class Terms>
  __device__ static void reduce(int lane, bf16* out, int n, const Terms& terms, const SumFormat& format, const LastTerm& last,
                                int begin, int end) {
    constexpr int step = 8 * lanes_of_warp;
#pragma unroll 1
    for (int base = begin; base < end; base += chunks * step) {
      const int at = base + 8 * lane;
      float sums[chunks][8] = {};
#pragma unroll 1
      for (int first = 0; first < n; first += ahead) {
        SumTerm some[ahead];
        RawEight<wire> raw[chunks][ahead];
#pragma unroll
        for (int j = 0; j < ahead; ++j) some[j] = first + j < n ? terms(first + j) : SumTerm{};
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
            if (some[j].row != nullptr && at + c * step < end) raw[c][j].load(some[j].row, at + c * step, format.row);
          }
        }
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
          if (some[j].row == nullptr) continue;
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const float value = raw[c][j].value(i, format.row);
              sums[c][i] = format.weighted ? __fmaf_rn(some[j].weight, value, sums[c][i]) : sums[c][i] + value;
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
  /// The instruction rounds as to_bf16 does, but for the bits of a NaN.
  __device__ static void store_eight(bf16* out, const float* values) {
    std::uint32_t pairs[4];
    bool any_nan = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = ptx::to_bf16_pair(values[2 * j], values[2 * j + 1]);
      any_nan |= values[2 * j] != values[2 * j] || values[2 * j + 1] != values[2 * j + 1];
    }
    if (any_nan) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = static_cast<std::uint32_t>(to_bf16(values[2 * j]).bits) |
                   static_cast<std::uint32_t>(to_bf16(values[2 * j + 1]).bits) << 16;
      }
    }
    *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

}  // namespace heddle
