// Bytes of one row on the wire, one source for host and device: values, then scales, each padded
// with zeros to 16 bytes.
#pragma once

#include <cstddef>

#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// Everything that fixes the bytes of a row. fp8: e4m3 values, then one scale a group (a byte or an
/// f32); nvfp4: e2m1 pairs (the even index in the low nibble), then one e4m3 scale for 16 values;
/// bf16: values alone. The last group may be short.
struct RowFormat {
  static constexpr std::size_t alignment = 16;
  static constexpr int nvfp4_group = 16;

  Wire wire = Wire::bf16;
  int hidden = 0;
  Quantisation quantisation;  ///< fp8 only
  float global_scale = 1.0f;  ///< nvfp4 only: a value is e2m1 * e4m3 scale * global_scale

  /// Values that share a scale; the whole row where there are no scales.
  HEDDLE_HOST_DEVICE int group_size() const {
    return wire == Wire::fp8 ? quantisation.group : (wire == Wire::nvfp4 ? nvfp4_group : hidden);
  }
  /// Scales in a row.
  HEDDLE_HOST_DEVICE int groups() const {
    if (wire == Wire::bf16) return 0;
    // Groups are 16, 32 or 128: shifts, because this is computed for every row.
    const int shift = wire == Wire::nvfp4 ? 4 : (quantisation.group == 32 ? 5 : 7);
    return (hidden + (1 << shift) - 1) >> shift;
  }
  HEDDLE_HOST_DEVICE std::size_t bytes_a_scale() const {
    return wire == Wire::fp8 && quantisation.scale == ScaleFormat::f32 ? sizeof(float) : 1;
  }
  HEDDLE_HOST_DEVICE std::size_t value_bytes() const {
    const auto values = static_cast<std::size_t>(hidden);
    return wire == Wire::bf16 ? 2 * values : (wire == Wire::fp8 ? values : (values + 1) / 2);
  }
  HEDDLE_HOST_DEVICE std::size_t scale_bytes() const { return static_cast<std::size_t>(groups()) * bytes_a_scale(); }
  /// Where the scales begin.
  HEDDLE_HOST_DEVICE std::size_t scale_offset() const { return padded(value_bytes()); }
  /// Where value `first`, which begins a group, and the group's scale lie in a row.
  HEDDLE_HOST_DEVICE std::size_t value_at(int first) const {
    const auto values = static_cast<std::size_t>(first);
    return wire == Wire::bf16 ? 2 * values : (wire == Wire::fp8 ? values : values / 2);
  }
  HEDDLE_HOST_DEVICE std::size_t scale_at(int first) const {
    return scale_offset() + static_cast<std::size_t>(first / group_size()) * bytes_a_scale();
  }
  /// Values and scales of `columns` of them, which begin and end with groups, as a row by itself.
  HEDDLE_HOST_DEVICE RowFormat part(int columns) const {
    RowFormat some = *this;
    some.hidden = columns;
    return some;
  }
  /// What a row takes in memory: a multiple of 16.
  HEDDLE_HOST_DEVICE std::size_t row_bytes() const { return scale_offset() + padded(scale_bytes()); }
  /// What a row carries: padding left out.
  HEDDLE_HOST_DEVICE std::size_t reported_bytes() const { return value_bytes() + scale_bytes(); }

  HEDDLE_HOST_DEVICE static constexpr std::size_t padded(std::size_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
  }
};

/// Do equal rows have equal bytes in both? Settings that a wire does not use are ignored.
HEDDLE_HOST_DEVICE inline bool same_bytes(const RowFormat& a, const RowFormat& b) {
  const bool same_scales = a.quantisation.group == b.quantisation.group && a.quantisation.scale == b.quantisation.scale;
  return a.wire == b.wire && a.hidden == b.hidden && (a.wire != Wire::fp8 || same_scales) &&
         (a.wire != Wire::nvfp4 || a.global_scale == b.global_scale);
}

}  // namespace heddle
