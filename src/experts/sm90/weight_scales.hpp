// Scales: what is chosen for each row when weights are loaded, the bytes in a slab's scales, and back. One source for host and
// device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/weight_order.hpp"
#include "experts/sm90/weight_words.hpp"
#include "formats/codes.hpp"

namespace heddle::sm90 {

/// Why a row cannot be laid out.
enum class RowFault : std::uint8_t {
  none,
  scale_nan,        ///< a scale that is not a number
  scale_negative,   ///< nvfp4
  value_nan,        ///< mxfp8
  tensor_scale,     ///< nvfp4: 256 times the tensor scale is no finite f32
  row_span,         ///< mxfp4: groups more than 11 binades apart, the plan without step exponents; mxfp8: more than 124
  step_span,        ///< mxfp4: more than 11 within a step
  step_factor_span  ///< mxfp4: steps of a row more than 126 apart
};

/// What is found out about a slab row.
struct RowSurvey {
  float scale = 1.0f;  ///< goes to row_scales
  RowFault fault = RowFault::none;
  int column = 0;  ///< the first that is wrong
  int span = 0;    ///< binades, of the *_span faults
};

namespace detail {

/// Columns that share a scale, and those groups in one step.
HEDDLE_HOST_DEVICE constexpr int scale_group(WeightKind kind) {
  return kind == WeightKind::nvfp4 ? 16 : kind == WeightKind::fp8_block ? 128 : 32;
}
HEDDLE_HOST_DEVICE constexpr int step_groups(WeightKind kind) { return slab_shape(kind).step / scale_group(kind); }

/// mxfp4. Under delta d the code of m stands for m * 2^(d - 6); d = 1..12 are normal numbers of e4m3. So a scale byte s (2^(s -
/// 127)) over a base of 2^x has the delta s - x - 121.
constexpr int mxfp4_delta_offset = 121;
constexpr int mxfp4_largest_delta = 12;
/// The base of groups whose largest scale byte is this: as small as it may be, so that room is left for small ones, but normal.
HEDDLE_HOST_DEVICE constexpr int mxfp4_base(int largest_scale) {
  const int base = largest_scale - mxfp4_delta_offset - mxfp4_largest_delta;
  return base < -126 ? -126 : base;
}
constexpr int mxfp4_base_of_zeros = mxfp4_base(127);

/// mxfp8. A factor's byte is the exponent field of a bf16 that makes up for 2^-120 (widen.hpp), so it ends at 254.
constexpr int mxfp8_scale_offset = 120;
constexpr int mxfp8_largest_scale = 254 - mxfp8_scale_offset;  ///< of a row whose row scale is 1
/// value * 2^(s - r - 127) is a normal bf16 for every e4m3 value if s - r - 127 >= -117.
constexpr int mxfp8_smallest_scale = 10;

HEDDLE_HOST_DEVICE inline float power_of_two(int exponent) {
  return float_from_bits(static_cast<std::uint32_t>(exponent + 127) << 23);
}
HEDDLE_HOST_DEVICE inline int exponent_of(float power) { return static_cast<int>(float_bits(power) >> 23) - 127; }

/// A row of a stored matrix, for looking at its groups.
struct StoredRow {
  WeightKind kind;
  const std::byte* values;
  const std::byte* scales;

  HEDDLE_HOST_DEVICE StoredRow(const WeightPlan& plan, const WeightSource& source, int row) : kind(plan.kind) {
    const StoredMatrix& matrix = source.half[WeightPlan::half_of(row)];
    const auto r = static_cast<std::size_t>(plan.source_row(row));
    values = matrix.values + r * matrix.value_pitch;
    scales = matrix.scales + (kind == WeightKind::fp8_block ? r / 128 : r) * matrix.scale_pitch;
  }
  HEDDLE_HOST_DEVICE int scale(int group) const { return static_cast<int>(scales[group]); }
  HEDDLE_HOST_DEVICE const std::byte* group_values(int group) const { return values + group * group_bytes(); }
  HEDDLE_HOST_DEVICE int group_bytes() const { return scale_group(kind) * value_bits(kind) / 8; }
  HEDDLE_HOST_DEVICE bool zero(int group) const {
    const std::byte magnitudes{static_cast<unsigned char>(value_bits(kind) == 4 ? 0x77 : 0x7F)};
    std::byte any{0};
    for (int i = 0; i < group_bytes(); ++i) any |= group_values(group)[i] & magnitudes;
    return any == std::byte{0};
  }
};

/// Largest and smallest scale byte among the groups [begin, end) that are not all zeros; largest is -1 where all are.
struct ScaleRange {
  int largest = -1;
  int smallest = 256;
};
HEDDLE_HOST_DEVICE inline ScaleRange scale_range(const StoredRow& row, int begin, int end) {
  ScaleRange range;
  for (int group = begin; group < end; ++group) {
    if (row.zero(group)) continue;
    const int scale = row.scale(group);
    range.largest = scale > range.largest ? scale : range.largest;
    range.smallest = scale < range.smallest ? scale : range.smallest;
  }
  return range;
}

/// The first group of [begin, end) that is not zero and has a scale byte below a limit.
HEDDLE_HOST_DEVICE inline int first_below(const StoredRow& row, int begin, int end, int limit) {
  for (int group = begin; group < end; ++group) {
    if (!row.zero(group) && row.scale(group) < limit) return group;
  }
  return begin;
}

HEDDLE_HOST_DEVICE inline int end_of_step(const WeightPlan& plan, int step) {
  const int groups = plan.cols / scale_group(plan.kind);
  const int end = (step + 1) * step_groups(plan.kind);
  return end < groups ? end : groups;
}

/// mxfp4 with step exponents: the exponent of a step's base.
HEDDLE_HOST_DEVICE inline int step_base(const WeightPlan& plan, const StoredRow& row, int step, int row_base) {
  const ScaleRange range = scale_range(row, step * step_groups(plan.kind), end_of_step(plan, step));
  return range.largest < 0 ? row_base : mxfp4_base(range.largest);
}

HEDDLE_HOST_DEVICE inline RowSurvey survey_mxfp4_steps(const WeightPlan& plan, const StoredRow& row, int row_base) {
  constexpr int groups = step_groups(WeightKind::mxfp4);
  RowSurvey survey{power_of_two(row_base)};
  for (int step = 0; step < plan.steps(); ++step) {
    const int end = end_of_step(plan, step);
    const ScaleRange range = scale_range(row, step * groups, end);
    if (range.largest < 0) continue;
    const int base = mxfp4_base(range.largest);
    const int least = base + mxfp4_delta_offset + 1;
    if (range.smallest < least) {
      return {1.0f, RowFault::step_span, 32 * first_below(row, step * groups, end, least), range.largest - range.smallest};
    }
    if (row_base - base > 126) return {1.0f, RowFault::step_factor_span, 32 * groups * step, row_base - base};
  }
  return survey;
}

HEDDLE_HOST_DEVICE inline RowSurvey survey_mxfp4(const WeightPlan& plan, const StoredRow& row) {
  const int groups = plan.cols / 32;
  for (int group = 0; group < groups; ++group) {
    if (row.scale(group) == ue8m0_nan) return {1.0f, RowFault::scale_nan, 32 * group, 0};
  }
  const ScaleRange range = scale_range(row, 0, groups);
  const int base = range.largest < 0 ? mxfp4_base_of_zeros : mxfp4_base(range.largest);
  if (plan.step_exponents) return survey_mxfp4_steps(plan, row, base);
  const int least = base + mxfp4_delta_offset + 1;
  if (range.smallest < least) {
    return {1.0f, RowFault::row_span, 32 * first_below(row, 0, groups, least), range.largest - range.smallest};
  }
  return {power_of_two(base)};
}

/// mxfp8: 2^r, where 1 does not do because a scale is above 2^7.
HEDDLE_HOST_DEVICE inline RowSurvey survey_mxfp8(const WeightPlan& plan, const StoredRow& row) {
  const int groups = plan.cols / 32;
  int largest = 0;
  for (int group = 0; group < groups; ++group) {
    const int scale = row.scale(group);
    if (scale == ue8m0_nan) return {1.0f, RowFault::scale_nan, 32 * group, 0};
    largest = scale > largest ? scale : largest;
    for (int i = 0; i < 32; ++i) {
      const auto code = static_cast<int>(row.group_values(group)[i]);
      if ((code & 0x7F) == e4m3_nan) return {1.0f, RowFault::value_nan, 32 * group + i, 0};
    }
  }
  const int raised = largest > mxfp8_largest_scale ? largest - mxfp8_largest_scale : 0;
  const int least = raised + mxfp8_smallest_scale;
  for (int group = 0; group < groups; ++group) {
    if (row.scale(group) < least && !row.zero(group)) {
      return {1.0f, RowFault::row_span, 32 * group, largest - row.scale(group)};
    }
  }
  return {power_of_two(raised)};
}

HEDDLE_HOST_DEVICE inline RowSurvey survey_nvfp4(const WeightPlan& plan, const StoredRow& row, float tensor_scale) {
  const float scale = 256.0f * tensor_scale;
  if (heddle::detail::magnitude_bits(scale) >= heddle::detail::infinity_bits) return {1.0f, RowFault::tensor_scale, 0, 0};
  for (int group = 0; group < plan.cols / 16; ++group) {
    const int code = row.scale(group);
    if ((code & 0x7F) == e4m3_nan) return {1.0f, RowFault::scale_nan, 16 * group, 0};
    if (code > 0x7F) return {1.0f, RowFault::scale_negative, 16 * group, 0};
  }
  return {scale};
}

}  // namespace detail

/// Chooses the row scale of slab row `row` (64 * slab + row of the slab), or says why it cannot be laid out.
HEDDLE_HOST_DEVICE inline RowSurvey survey_row(const WeightPlan& plan, const WeightSource& source, int row) {
  const detail::StoredRow stored(plan, source, row);
  switch (plan.kind) {
    case WeightKind::mxfp4:
      return detail::survey_mxfp4(plan, stored);
    case WeightKind::mxfp8:
      return detail::survey_mxfp8(plan, stored);
    case WeightKind::nvfp4:
      return detail::survey_nvfp4(plan, stored, source.half[WeightPlan::half_of(row)].tensor_scale);
    default:
      return {};
  }
}

/// Where in a slab's scales the scale of a row of the slab and a group of the step lies; fp8_block's is an f32, the others a byte.
/// A thread's own are contiguous, in the order in which widening takes them.
HEDDLE_HOST_DEVICE constexpr int scale_index(WeightKind kind, int slab_row_index, int group) {
  const int threads = slab_row_index / 16 * 8 + slab_row_index % 8;  // thread / 4
  const int half = WeightPlan::half_of(slab_row_index);
  switch (kind) {
    case WeightKind::mxfp4:
      return threads * 8 + 2 * group + half;
    case WeightKind::mxfp8:
      return threads * 4 + 2 * group + half;
    case WeightKind::nvfp4:
      return threads * 8 + group / 2 * 4 + 2 * half + group % 2;
    default:
      return 4 * half;
  }
}
/// mxfp4: of the step exponent of a row of the slab.
HEDDLE_HOST_DEVICE constexpr int step_exponent_index(int slab_row_index) {
  return slab_shape(WeightKind::mxfp4).scale_bytes + (slab_row_index / 16 * 8 + slab_row_index % 8) * 2 +
         WeightPlan::half_of(slab_row_index);
}

namespace detail {

HEDDLE_HOST_DEVICE inline void write_bits(std::byte* to, std::uint32_t bits) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(bits >> (8 * i) & 0xFFu);
}
HEDDLE_HOST_DEVICE inline std::uint32_t read_bits(const std::byte* from) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return bits;
}

/// Added to a stored scale byte, modulo 256, to make the slab's; groups of zeros may wrap around.
HEDDLE_HOST_DEVICE inline int scale_shift(WeightKind kind, float row_scale, int step_exponent) {
  if (kind == WeightKind::mxfp4) return -(exponent_of(row_scale) + step_exponent - 127) - mxfp4_delta_offset;
  if (kind == WeightKind::mxfp8) return mxfp8_scale_offset - exponent_of(row_scale);
  return 0;
}

}  // namespace detail

/// Writes what one row has of the scales of its slab and step, at `scales` (WeightPlan::scales_offset). bf16 has none.
HEDDLE_HOST_DEVICE inline void order_scales(const WeightPlan& plan, const WeightSource& source, float row_scale, int slab, int step,
                                            int slab_row_index, std::byte* scales) {
  if (plan.kind == WeightKind::bf16) return;
  const int row = slab * slab_rows + slab_row_index;
  const detail::StoredRow stored(plan, source, row);
  if (plan.kind == WeightKind::fp8_block) {
    if (slab_row_index % 8 != 0 || slab_row_index / 16 != 0) return;  // one row of each half speaks for it
    const bool wide = source.half[WeightPlan::half_of(row)].block_scale == ScaleFormat::f32;
    const std::uint32_t bits =
        wide ? detail::read_bits(stored.scales + 4 * step) : float_bits(from_ue8m0(static_cast<std::uint8_t>(stored.scales[step])));
    detail::write_bits(scales + scale_index(plan.kind, slab_row_index, 0), bits);
    return;
  }
  int step_exponent = 127;
  if (plan.step_exponents) {
    const int row_base = detail::exponent_of(row_scale);
    step_exponent += detail::step_base(plan, stored, step, row_base) - row_base;
    scales[step_exponent_index(slab_row_index)] = static_cast<std::byte>(step_exponent);
  }
  const int shift = detail::scale_shift(plan.kind, row_scale, step_exponent);
  const int first = step * detail::step_groups(plan.kind);
  const int end = detail::end_of_step(plan, step);
  for (int group = 0; group < detail::step_groups(plan.kind); ++group) {
    const int byte = first + group < end ? (stored.scale(first + group) + shift) & 0xFF : 0;
    scales[scale_index(plan.kind, slab_row_index, group)] = static_cast<std::byte>(byte);
  }
}

/// The inverse: writes the stored scales of one row and step. fp8_block: only the first row of a block writes its scale.
HEDDLE_HOST_DEVICE inline void restore_scales(const WeightPlan& plan, const std::byte* scales, float row_scale, int slab, int step,
                                              int slab_row_index, const WeightTarget& target) {
  if (plan.kind == WeightKind::bf16) return;
  const int row = slab * slab_rows + slab_row_index;
  const StoredBytes<std::byte>& matrix = target.half[WeightPlan::half_of(row)];
  const auto source_row = static_cast<std::size_t>(plan.source_row(row));
  if (plan.kind == WeightKind::fp8_block) {
    if (source_row % 128 != 0) return;
    std::byte* to = matrix.scales + source_row / 128 * matrix.scale_pitch;
    const std::uint32_t bits = detail::read_bits(scales + scale_index(plan.kind, slab_row_index, 0));
    if (matrix.block_scale == ScaleFormat::f32) {
      detail::write_bits(to + 4 * step, bits);
    } else {
      const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
      to[step] = static_cast<std::byte>(nan ? ue8m0_nan : bits >> 23 & 0xFFu);  // 2^-127 has a zero exponent field too
    }
    return;
  }
  const int step_exponent = plan.step_exponents ? static_cast<int>(scales[step_exponent_index(slab_row_index)]) : 127;
  const int shift = detail::scale_shift(plan.kind, row_scale, step_exponent);
  const int first = step * detail::step_groups(plan.kind);
  std::byte* to = matrix.scales + source_row * matrix.scale_pitch;
  for (int group = first; group < detail::end_of_step(plan, step); ++group) {
    const int byte = static_cast<int>(scales[scale_index(plan.kind, slab_row_index, group - first)]);
    to[group] = static_cast<std::byte>((byte - shift) & 0xFF);
  }
}

}  // namespace heddle::sm90
