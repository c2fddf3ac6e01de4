// Rows in the hands of a warp: copying, quantising to a wire format, and summing. The scalar rules are those
// of src/formats, compiled without contraction, so the bits are the host's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/group.hpp"
#include "signal/worker.hpp"

namespace heddle {

class WarpRows {
 public:
  static constexpr int lanes_of_warp = 32;
  static constexpr unsigned all_lanes = 0xFFFFFFFFu;

  __device__ explicit WarpRows(int lane) : lane_(lane) {}

  /// A multiple of 16 bytes, eight vectors a lane in flight.
  __device__ void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    const int n = static_cast<int>(bytes / 16);
    const auto* source = reinterpret_cast<const uint4*>(from);
    auto* target = reinterpret_cast<uint4*>(to);
    int i = lane_;
    for (; i + 7 * lanes_of_warp < n; i += 8 * lanes_of_warp) {
      uint4 values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = source[i + j * lanes_of_warp];
#pragma unroll
      for (int j = 0; j < 8; ++j) target[i + j * lanes_of_warp] = values[j];
    }
    for (; i < n; i += lanes_of_warp) target[i] = source[i];
  }

  /// A bf16 row to its wire format, padding included.
  __device__ void quantise(std::byte* to, const bf16* from, const RowFormat& format) {
    switch (format.wire) {
      case Wire::bf16:
        copy(to, reinterpret_cast<const std::byte*>(from), format.row_bytes());
        break;
      case Wire::fp8:
        quantise_fp8(to, from, format);
        break;
      case Wire::nvfp4:
        quantise_nvfp4(to, from, format);
        break;
    }
  }

  /// out[begin, end) = bf16(sum over i < n of terms(i), in order, then last), eight columns a lane.
  template <class Terms>
  __device__ void sum(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int begin, int end) {
    switch (format.row.wire) {
      case Wire::bf16:
        reduce<Wire::bf16>(out, n, terms, format, last, begin, end);
        break;
      case Wire::fp8:
        reduce<Wire::fp8>(out, n, terms, format, last, begin, end);
        break;
      case Wire::nvfp4:
        reduce<Wire::nvfp4>(out, n, terms, format, last, begin, end);
        break;
    }
  }

 private:
  struct Four {
    float value[4];
  };
  __device__ Four load_four(const bf16* from) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    return {{float_from_bits(bits.x << 16), float_from_bits(bits.x & 0xFFFF0000u), float_from_bits(bits.y << 16),
             float_from_bits(bits.y & 0xFFFF0000u)}};
  }

  __device__ void pad_scales(std::byte* to, const RowFormat& format) {
    const std::size_t begin = format.scale_offset() + format.scale_bytes();
    for (std::size_t i = begin + static_cast<std::size_t>(lane_); i < format.row_bytes(); i += lanes_of_warp) to[i] = std::byte{0};
  }

  // Quantising a row: a pass is 128 values, four a lane, so that a group of 128 is the warp, one of 32 eight
  // lanes and one of 16 four. Several passes are in flight together, and the divisions for the scales of all
  // their groups are dealt over the lanes, one group a lane.

  /// What the values of a group are divided by, as the lane that made it hands it to the others.
  struct GroupScale {
    float scale = 0;
    float inverse = 0;
    std::uint32_t code = 0;  ///< as stored
  };

  /// `width` lanes a group, `passes` passes at a time, at most one group a lane.
  template <int width, int passes, class Magnitude, class MakeScale, class Store>
  __device__ void quantise_groups(const bf16* from, int hidden, Magnitude magnitude, MakeScale make_scale, Store store) {
    constexpr int groups_a_pass = lanes_of_warp / width;
    static_assert(groups_a_pass * passes <= lanes_of_warp);
    constexpr int pass = 4 * lanes_of_warp;
    for (int base = 0; base < hidden; base += passes * pass) {
      const int at = base + 4 * lane_;
      Four fours[passes];
      std::int32_t largest[passes];
#pragma unroll
      for (int j = 0; j < passes; ++j) fours[j] = at + j * pass < hidden ? load_four(from + at + j * pass) : Four{};
#pragma unroll
      for (int j = 0; j < passes; ++j) {
        largest[j] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[j] = max(largest[j], magnitude(fours[j].value[i]));
      }
#pragma unroll
      for (int distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int j = 0; j < passes; ++j) largest[j] = max(largest[j], __shfl_xor_sync(all_lanes, largest[j], distance));
      }
      // Group g of pass j is made by lane j * groups_a_pass + g.
      std::int32_t mine = 0;
#pragma unroll
      for (int j = 0; j < passes; ++j) {
        const std::int32_t found = __shfl_sync(all_lanes, largest[j], lane_ % groups_a_pass * width);
        if (lane_ / groups_a_pass == j) mine = found;
      }
      const GroupScale made = make_scale(group_amax(mine));
#pragma unroll
      for (int j = 0; j < passes; ++j) {
        const int maker = j * groups_a_pass + lane_ / width;
        GroupScale group;
        group.scale = __shfl_sync(all_lanes, made.scale, maker);
        group.inverse = __shfl_sync(all_lanes, made.inverse, maker);
        group.code = __shfl_sync(all_lanes, made.code, maker);
        if (at + j * pass < hidden) store(at + j * pass, fours[j], group, lane_ % width == 0);
      }
    }
  }

  template <int width>
  __device__ void quantise_fp8_groups(std::byte* to, const bf16* from, const RowFormat& format) {
    const bool power_of_two = format.quantisation.scale == ScaleFormat::ue8m0;
    std::byte* scales = to + format.scale_offset();
    const auto make_scale = [&](float amax) {
      GroupScale group;
      group.scale = fp8_scale(amax, format.quantisation.scale);
      group.inverse = power_of_two ? fp8_inverse(group.scale) : 0.0f;
      group.code = power_of_two ? fp8_scale_byte(group.scale) : float_bits(group.scale);
      return group;
    };
    const auto store = [&](int at, const Four& four, const GroupScale& group, bool first_lane) {
      std::uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint8_t code =
            power_of_two ? fp8_code_by_inverse(four.value[i], group.inverse) : fp8_code(four.value[i], group.scale);
        codes |= static_cast<std::uint32_t>(code) << (8 * i);
      }
      *reinterpret_cast<std::uint32_t*>(to + at) = codes;
      if (!first_lane) return;
      const int number = at / (4 * width);
      if (power_of_two) {
        scales[number] = static_cast<std::byte>(group.code);
      } else {
        reinterpret_cast<std::uint32_t*>(scales)[number] = group.code;
      }
    };
    quantise_groups<width, 8>(
        from, format.hidden, [](float value) { return fp8_magnitude(value); }, make_scale, store);
    pad_scales(to, format);
  }

  __device__ void quantise_fp8(std::byte* to, const bf16* from, const RowFormat& format) {
    if (format.quantisation.group == 128) {
      quantise_fp8_groups<32>(to, from, format);
    } else {
      quantise_fp8_groups<8>(to, from, format);
    }
  }

  __device__ void quantise_nvfp4(std::byte* to, const bf16* from, const RowFormat& format) {
    std::byte* scales = to + format.scale_offset();
    const auto make_scale = [&](float amax) {
      GroupScale group;
      group.code = nvfp4_scale(amax, format.global_scale);
      group.scale = nvfp4_divisor(static_cast<std::uint8_t>(group.code), format.global_scale);
      return group;
    };
    const auto store = [&](int at, const Four& four, const GroupScale& group, bool first_lane) {
      std::uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) codes |= static_cast<std::uint32_t>(nvfp4_code(four.value[i], group.scale)) << (4 * i);
      *reinterpret_cast<std::uint16_t*>(to + at / 2) = static_cast<std::uint16_t>(codes);
      if (first_lane) scales[at / RowFormat::nvfp4_group] = static_cast<std::byte>(group.code);
    };
    quantise_groups<4, 4>(
        from, format.hidden, [](float value) { return nvfp4_magnitude(value); }, make_scale, store);
    pad_scales(to, format);
  }

  /// Eight values of a row, widened.
  struct Eight {
    float value[8];
  };
  template <Wire wire>
  __device__ Eight load_eight(const std::byte* row, int at, const RowFormat& format) {
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
  __device__ void reduce(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, int begin, int end) {
    constexpr int ahead = 4;
    constexpr int chunks = 2;
    constexpr int step = 8 * lanes_of_warp;
    for (int at = begin + 8 * lane_; at < end; at += chunks * step) {
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
  __device__ void finish_chunk(bf16* out, int at, float* sum, const SumFormat& format, const LastTerm& last) {
    if (last.row != nullptr) {
      const Eight shared = load_eight<Wire::bf16>(reinterpret_cast<const std::byte*>(last.row), at, format.row);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = sum[i] + __fmul_rn(last.factor, shared.value[i]);
    }
    store_eight(out + at, sum);
  }
  __device__ void store_eight(bf16* out, const float* values) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = static_cast<std::uint32_t>(to_bf16(values[2 * j]).bits) |
                 static_cast<std::uint32_t>(to_bf16(values[2 * j + 1]).bits) << 16;
    }
    *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  int lane_;
};

}  // namespace heddle
