#include "formats/rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "formats/group.hpp"
#include "formats/wide.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

// Rows are worked on in pieces of 128 values: every group size divides it.
constexpr int piece = 128;

HEDDLE_WIDE void widen_bf16(const std::byte* in, int count, float* out) {
  for (int i = 0; i < count; ++i) {
    bf16 value;
    std::memcpy(&value, in + sizeof(bf16) * static_cast<std::size_t>(i), sizeof value);
    out[i] = to_float(value);
  }
}

HEDDLE_WIDE void narrow_to_bf16(const float* in, int count, std::byte* out) {
  for (int i = 0; i < count; ++i) {
    const bf16 value = to_bf16(in[i]);
    std::memcpy(out + sizeof(bf16) * static_cast<std::size_t>(i), &value, sizeof value);
  }
}

HEDDLE_WIDE void quantise_fp8_groups(const float* in, int count, Quantisation quantisation, std::uint8_t* values,
                                     std::byte* scales) {
  for (int begin = 0, group = 0; begin < count; begin += quantisation.group, ++group) {
    const int end = std::min(begin + quantisation.group, count);
    std::int32_t largest = 0;
    for (int i = begin; i < end; ++i) largest = std::max(largest, fp8_magnitude(in[i]));
    const float scale = fp8_scale(group_amax(largest), quantisation.scale);
    if (quantisation.scale == ScaleFormat::ue8m0) {
      scales[group] = std::byte{fp8_scale_byte(scale)};
      const float inverse = fp8_inverse(scale);
      for (int i = begin; i < end; ++i) values[i] = fp8_code_by_inverse(in[i], inverse);
    } else {
      std::memcpy(scales + sizeof scale * static_cast<std::size_t>(group), &scale, sizeof scale);
      for (int i = begin; i < end; ++i) values[i] = fp8_code(in[i], scale);
    }
  }
}

HEDDLE_WIDE void widen_fp8_groups(const std::uint8_t* values, const std::byte* scales, int count, Quantisation quantisation,
                                  float* out) {
  for (int begin = 0, group = 0; begin < count; begin += quantisation.group, ++group) {
    const int end = std::min(begin + quantisation.group, count);
    float scale = from_ue8m0(static_cast<std::uint8_t>(scales[group]));
    if (quantisation.scale == ScaleFormat::f32) {
      std::memcpy(&scale, scales + sizeof scale * static_cast<std::size_t>(group), sizeof scale);
    }
    for (int i = begin; i < end; ++i) out[i] = from_e4m3(values[i]) * scale;
  }
}

/// One piece: count <= 128. Groups are too short for good vector code, so the codes are made by one
/// loop over the piece, with each value's divisor beside it.
HEDDLE_WIDE void quantise_nvfp4_piece(const float* in, int count, float global_scale, std::uint8_t* pairs, std::byte* scales) {
  constexpr int size = RowFormat::nvfp4_group;
  std::array<float, piece> values{}, divisors{};  // values that do not exist are zeros, which change no maximum
  std::array<std::uint8_t, piece> codes;
  std::copy_n(in, count, values.data());
  for (int begin = 0; begin < count; begin += size) {
    std::int32_t largest = 0;
    for (int i = begin; i < begin + size; ++i) largest = std::max(largest, nvfp4_magnitude(values.data()[i]));
    const std::uint8_t scale = nvfp4_scale(group_amax(largest), global_scale);
    scales[begin / size] = std::byte{scale};
    std::fill_n(divisors.data() + begin, size, nvfp4_divisor(scale, global_scale));
  }
  for (std::size_t i = 0; i < piece; ++i) codes[i] = nvfp4_code(values[i], divisors[i]);
  if (count % 2 != 0) codes.data()[count] = 0;  // no value: 0 / NaN must not leave a code
  for (int pair = 0; pair < (count + 1) / 2; ++pair) {
    pairs[pair] = static_cast<std::uint8_t>(codes.data()[2 * pair] | (codes.data()[2 * pair + 1] << 4));
  }
}

HEDDLE_WIDE void widen_nvfp4_groups(const std::uint8_t* pairs, const std::byte* scales, int count, float global_scale, float* out) {
  constexpr int size = RowFormat::nvfp4_group;
  for (int begin = 0; begin < count; begin += size) {
    const auto scale = static_cast<std::uint8_t>(scales[begin / size]);
    const auto value = [=](int i) {
      return nvfp4_value(static_cast<std::uint8_t>(pairs[i / 2] >> (4 * (i & 1))), scale, global_scale);
    };
    const int end = std::min(begin + size, count);
    for (int i = begin; i + 1 < end; i += 2) {
      out[i] = value(i);
      out[i + 1] = value(i + 1);
    }
    if (end % 2 != 0) out[end - 1] = value(end - 1);
  }
}

std::uint8_t* codes_at(std::byte* bytes) { return reinterpret_cast<std::uint8_t*>(bytes); }
const std::uint8_t* codes_at(const std::byte* bytes) { return reinterpret_cast<const std::uint8_t*>(bytes); }

void write_piece(const float* in, int begin, int count, const RowFormat& format, std::byte* row) {
  std::byte* values = row + format.value_at(begin);
  if (format.wire == Wire::bf16) {
    narrow_to_bf16(in, count, values);
  } else if (format.wire == Wire::fp8) {
    quantise_fp8_groups(in, count, format.quantisation, codes_at(values), row + format.scale_at(begin));
  } else {
    quantise_nvfp4_piece(in, count, format.global_scale, codes_at(values), row + format.scale_at(begin));
  }
}

void widen_piece(const std::byte* row, const RowFormat& format, int begin, int count, float* out) {
  const std::byte* values = row + format.value_at(begin);
  if (format.wire == Wire::bf16) {
    widen_bf16(values, count, out);
  } else if (format.wire == Wire::fp8) {
    widen_fp8_groups(codes_at(values), row + format.scale_at(begin), count, format.quantisation, out);
  } else {
    widen_nvfp4_groups(codes_at(values), row + format.scale_at(begin), count, format.global_scale, out);
  }
}

void zero_padding(const RowFormat& format, std::byte* row) {
  const std::size_t values = format.value_bytes(), scales = format.scale_offset() + format.scale_bytes();
  std::fill(row + values, row + format.scale_offset(), std::byte{0});
  std::fill(row + scales, row + format.row_bytes(), std::byte{0});
}

/// Writes a row whose values come in pieces: read(begin, count, buffer) gives f32 values of one piece.
template <class Read>
void write_row(Read read, const RowFormat& format, std::byte* out) {
  std::array<float, piece> values;
  for (int begin = 0; begin < format.hidden; begin += piece) {
    const int count = std::min(piece, format.hidden - begin);
    read(begin, count, values.data());
    write_piece(values.data(), begin, count, format, out);
  }
  zero_padding(format, out);
}

}  // namespace

void check_row_format(const RowFormat& format) {
  const int group = format.quantisation.group;
  if (format.hidden < 1) throw InputError(fmt::format("row format: hidden size is {}, at least 1 is needed", format.hidden));
  if (format.wire == Wire::fp8 && group != 128 && group != 32) {
    throw InputError(fmt::format("row format: {} values share an fp8 scale, 128 or 32 are supported", group));
  }
  if (format.wire == Wire::nvfp4 && !(format.global_scale > 0.0f && std::isfinite(format.global_scale))) {
    throw InputError(
        fmt::format("row format: the nvfp4 global scale is {}, it has to be positive and finite", format.global_scale));
  }
}

void quantise_row(const bf16* in, const RowFormat& format, std::byte* out) {
  const auto* bytes = reinterpret_cast<const std::byte*>(in);
  if (format.wire == Wire::bf16) {
    std::memcpy(out, bytes, format.value_bytes());
    zero_padding(format, out);
    return;
  }
  write_row(
      [bytes](int begin, int count, float* to) { widen_bf16(bytes + sizeof(bf16) * static_cast<std::size_t>(begin), count, to); },
      format, out);
}

void quantise_row(const float* in, const RowFormat& format, std::byte* out) {
  write_row([in](int begin, int count, float* to) { std::copy_n(in + begin, count, to); }, format, out);
}

void widen_row(const std::byte* row, const RowFormat& format, float* out) { widen_piece(row, format, 0, format.hidden, out); }

void convert_row(const std::byte* in, const RowFormat& from, std::byte* out, const RowFormat& to) {
  if (same_bytes(from, to)) {
    std::memcpy(out, in, to.row_bytes());
    return;
  }
  write_row([in, &from](int begin, int count, float* values) { widen_piece(in, from, begin, count, values); }, to, out);
}

void quantise_fp8(const float* in, int count, const Quantisation& quantisation, std::uint8_t* values, std::byte* scales) {
  quantise_fp8_groups(in, count, quantisation, values, scales);
}

void widen_fp8(const std::uint8_t* values, const std::byte* scales, int count, const Quantisation& quantisation, float* out) {
  widen_fp8_groups(values, scales, count, quantisation, out);
}

}  // namespace heddle
