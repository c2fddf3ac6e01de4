// A bf16 row on its way to one or several places, in wire format, by a warp: read once, converted in registers,
// written to every place. The scalar rules are those of src/formats, so the bits are the host's.
//
// A pass is 512 values, sixteen a lane, so that a group of 128 is eight lanes, one of 32 two and one of 16 a
// single one, and that codes leave in 8 or 16 bytes a lane. Several passes are in flight together; the
// scales of all their groups are dealt over the lanes, one group a lane, because divisions are slow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/group.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"

namespace heddle {

/// Values of a pass; what a row is divided by for several workers.
constexpr int row_piece_values = 512;

/// plain: rows are never quantised.
template <bool plain>
class RowSender {
 public:
  static constexpr int lanes_of_warp = 32;
  static constexpr unsigned all_lanes = 0xFFFFFFFFu;
  static constexpr int pass_values = row_piece_values;

  /// `from` [hidden] to to(i) for i < n in wire format, padding included; null places are left out. Only the
  /// passes of the part.
  template <class To>
  __device__ static void send(int lane, int n, To to, const bf16* from, const RowFormat& format, const RowPart& part) {
    const int passes = (format.hidden + pass_values - 1) / pass_values;
    const int first = part.begin(passes);
    const int last = part.end(passes);
    if constexpr (!plain) {
      if (format.wire != Wire::bf16) return send_in_turns(lane, n, to, from, format, first, last);
    }
    send_plain(lane, n, to, from, format, first, last);
  }

 private:
  /// Sixteen values of a lane as they lie in memory.
  struct Sixteen {
    uint4 halves[2];
    __device__ float value(int i) const {
      const uint4& half = halves[i / 8];
      const int word = i % 8 / 2;
      const std::uint32_t pair = word == 0 ? half.x : (word == 1 ? half.y : (word == 2 ? half.z : half.w));
      return float_from_bits(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
    }
  };
  /// What the values of a group are divided by, as the lane that made it hands it to the others.
  struct GroupScale {
    float scale = 0;
    float inverse = 0;
    std::uint32_t code = 0;  ///< as stored
  };

  /// Each scale format has code of its own: a division is long, and where it stands between what runs, that comes from far away.
  template <ScaleFormat scale_format>
  struct Fp8 {
    static constexpr bool power_of_two = scale_format == ScaleFormat::ue8m0;
    __device__ std::int32_t magnitude(float value) const { return fp8_magnitude(value); }
    __device__ GroupScale make(float amax) const {
      GroupScale group;
      group.scale = fp8_scale(amax, scale_format);
      group.inverse = power_of_two ? fp8_inverse(group.scale) : 0.0f;
      group.code = power_of_two ? fp8_scale_byte(group.scale) : float_bits(group.scale);
      return group;
    }
    __device__ void store(int n, std::byte* const* places, int at, const Sixteen& values, const GroupScale& group) const {
      std::uint32_t codes[4] = {};
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const float a = values.value(i);
        const float b = values.value(i + 1);
        const std::uint32_t pair = power_of_two ? ptx::to_e4m3_pair(a * group.inverse, b * group.inverse)
                                                : ptx::to_e4m3_pair(detail::divide(a, group.scale), detail::divide(b, group.scale));
        codes[i / 4] |= pair << (8 * (i % 4));
      }
      for (int i = 0; i < n; ++i) *reinterpret_cast<uint4*>(places[i] + at) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    }
  };
  struct Nvfp4 {
    float global_scale;
    __device__ std::int32_t magnitude(float value) const { return nvfp4_magnitude(value); }
    __device__ GroupScale make(float amax) const {
      GroupScale group;
      group.code = nvfp4_scale(amax, global_scale);
      group.scale = nvfp4_divisor(static_cast<std::uint8_t>(group.code), global_scale);
      return group;
    }
    __device__ void store(int n, std::byte* const* places, int at, const Sixteen& values, const GroupScale& group) const {
      std::uint32_t codes[2] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        codes[i / 8] |= static_cast<std::uint32_t>(nvfp4_code(values.value(i), group.scale)) << (4 * (i % 8));
      }
      for (int i = 0; i < n; ++i) *reinterpret_cast<uint2*>(places[i] + at / 2) = make_uint2(codes[0], codes[1]);
    }
  };

  template <class To>
  __device__ static void send_in_turns(int lane, int n, To to, const bf16* from, const RowFormat& format, int first, int last) {
    std::byte* places[most_places];
    for (int next = 0; next < n;) {
      int found = 0;
      for (; next < n && found < most_places; ++next) {
        std::byte* place = to(next);
        if (place != nullptr) places[found++] = place;
      }
      if (found > 0) send_quantised(lane, found, places, from, format, first, last);
    }
  }
  /// The format by value: with an address, all that it lies in would have to be in memory.
  __device__ __noinline__ static void send_quantised(int lane, int n, std::byte* const* places, const bf16* from, RowFormat format,
                                                     int first, int last) {
    if (format.wire == Wire::nvfp4) {
      send_groups<1, 1>(lane, n, places, from, format, first, last, Nvfp4{format.global_scale});
    } else if (format.quantisation.scale == ScaleFormat::ue8m0) {
      send_fp8<ScaleFormat::ue8m0>(lane, n, places, from, format, first, last);
    } else {
      send_fp8<ScaleFormat::f32>(lane, n, places, from, format, first, last);
    }
  }
  template <ScaleFormat scale>
  __device__ static void send_fp8(int lane, int n, std::byte* const* places, const bf16* from, const RowFormat& format, int first,
                                  int last) {
    if (format.quantisation.group != 128) return send_groups<2, 2>(lane, n, places, from, format, first, last, Fp8<scale>{});
    switch (last - first) {
      case 1:
        return send_groups<8, 1>(lane, n, places, from, format, first, last, Fp8<scale>{});
      case 2:
        return send_groups<8, 2>(lane, n, places, from, format, first, last, Fp8<scale>{});
      default:
        return send_groups<8, 4>(lane, n, places, from, format, first, last, Fp8<scale>{});
    }
  }

  template <class To>
  __device__ static void send_plain(int lane, int n, To to, const bf16* from, const RowFormat& format, int first, int last) {
    constexpr int ahead = 4;
    const int end = min(last * pass_values, format.hidden) / 8;  // in 16-byte vectors
    const auto* source = reinterpret_cast<const uint4*>(from);
    for (int base = first * pass_values / 8; base < end; base += ahead * lanes_of_warp) {
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

  /// `width` lanes a group, `passes` passes at a time, at most one group a lane.
  template <int width, int passes, class Rule>
  __device__ static void send_groups(int lane, int n, std::byte* const* places, const bf16* from, const RowFormat& format,
                                     int first, int last, const Rule& rule) {
    constexpr int groups_a_pass = lanes_of_warp / width;
    static_assert(groups_a_pass * passes <= lanes_of_warp);
    for (int pass = first; pass < last; pass += passes) {
      Sixteen values[passes];
      std::int32_t largest[passes];
#pragma unroll
      for (int j = 0; j < passes; ++j) {
        const int at = (pass + j) * pass_values + 16 * lane;
        const bool there = pass + j < last && at < format.hidden;
        const auto* source = reinterpret_cast<const uint4*>(from + at);
        values[j] = there ? Sixteen{{source[0], source[1]}} : Sixteen{};
        largest[j] = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) largest[j] = max(largest[j], rule.magnitude(values[j].value(i)));
#pragma unroll
        for (int distance = width / 2; distance > 0; distance /= 2)
          largest[j] = max(largest[j], __shfl_xor_sync(all_lanes, largest[j], distance));
      }
      // Group g of pass j is made by lane j * groups_a_pass + g.
      std::int32_t mine = largest[0];
      if constexpr (width > 1) {
#pragma unroll
        for (int j = 0; j < passes; ++j) {
          const std::int32_t found = __shfl_sync(all_lanes, largest[j], lane % groups_a_pass * width);
          if (lane / groups_a_pass == j) mine = found;
        }
      }
      const GroupScale made = rule.make(group_amax(mine));
      GroupScale own[passes];
#pragma unroll
      for (int j = 0; j < passes; ++j) {
        const int maker = j * groups_a_pass + lane / width;
        own[j].scale = __shfl_sync(all_lanes, made.scale, maker);
        own[j].inverse = __shfl_sync(all_lanes, made.inverse, maker);
      }
#pragma unroll
      for (int j = 0; j < passes; ++j) {
        const int at = (pass + j) * pass_values + 16 * lane;
        if (pass + j < last && at < format.hidden) rule.store(n, places, at, values[j], own[j]);
        if (pass + j < last) store_scales<groups_a_pass>(lane, n, places, pass + j, made.code, j * groups_a_pass, format);
      }
    }
    if (first < last && last * pass_values >= format.hidden) pad_scales<groups_a_pass>(lane, n, places, last, format);
  }

  /// The scales of one pass, a 4-byte word a lane; maker: the lane that made its first group.
  template <int groups_a_pass>
  __device__ static void store_scales(int lane, int n, std::byte* const* places, int pass, std::uint32_t code, int maker,
                                      const RowFormat& format) {
    const int first_group = pass * groups_a_pass;
    const bool bytes = format.bytes_a_scale() == 1;
    std::uint32_t word = 0;
    int words = groups_a_pass;
    if (bytes) {
      words = groups_a_pass / 4;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int group = 4 * lane + b;
        const std::uint32_t found = __shfl_sync(all_lanes, code, (maker + group) % lanes_of_warp);
        if (first_group + group < format.groups()) word |= found << (8 * b);
      }
    } else {
      const std::uint32_t found = __shfl_sync(all_lanes, code, (maker + lane) % lanes_of_warp);
      if (first_group + lane < format.groups()) word = found;
    }
    const int first_word = bytes ? first_group / 4 : first_group;
    if (lane >= words || 4 * static_cast<std::size_t>(first_word + lane) >= RowFormat::padded(format.scale_bytes())) return;
    for (int i = 0; i < n; ++i) reinterpret_cast<std::uint32_t*>(places[i] + format.scale_offset())[first_word + lane] = word;
  }
  /// Zeros from where the passes' scales end.
  template <int groups_a_pass>
  __device__ static void pad_scales(int lane, int n, std::byte* const* places, int passes, const RowFormat& format) {
    const int covered = passes * groups_a_pass * static_cast<int>(format.bytes_a_scale()) / 4;
    const int words = static_cast<int>(RowFormat::padded(format.scale_bytes()) / 4);
    for (int word = covered + lane; word < words; word += lanes_of_warp) {
      for (int i = 0; i < n; ++i) reinterpret_cast<std::uint32_t*>(places[i] + format.scale_offset())[word] = 0;
    }
  }

  static constexpr int most_places = 8;
};

}  // namespace heddle
