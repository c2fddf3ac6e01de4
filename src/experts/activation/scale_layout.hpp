// Where the scale of (row, group) lies, one source for host and device. A row is a place in the buffers of the
// step, whatever expert it belongs to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle {

enum class ScaleOrder : std::uint8_t {
  /// f32 or ue8m0 [rows, groups].
  row_major,
  /// f32 [groups, padded_rows]: the rows of a group lie together, as TMA reads them for a block of rows. padded_rows is
  /// a multiple of 4, so that every group begins at a multiple of 16 bytes.
  column_major,
  /// ue8m0, four groups in an int32, [ceil(groups / 4), padded_rows] words: group g of a row is byte g % 4, counted from the
  /// least significant, of word (g / 4) * padded_rows + row. padded_rows is a multiple of 4. Bytes of the last word beyond
  /// the last group are 0. This is the order that block-scaled MMAs of Blackwell take.
  packed,
};

struct ScaleLayout {
  ScaleOrder order = ScaleOrder::row_major;
  ScaleFormat format = ScaleFormat::ue8m0;
  int groups = 0;
  int padded_rows = 0;  ///< column_major and packed: at least the rows of the buffers
  int row_bytes = 0;    ///< row_major: from one row's scales to the next one's, a multiple of bytes_a_scale(); 0: without gaps

  static constexpr int row_multiple = 4;
  static constexpr int groups_a_word = 4;

  HEDDLE_HOST_DEVICE std::size_t bytes_a_scale() const { return format == ScaleFormat::f32 ? sizeof(float) : 1; }
  /// Bytes between the scales of neighbouring rows.
  HEDDLE_HOST_DEVICE std::size_t row_stride() const {
    if (order != ScaleOrder::row_major) return sizeof(std::uint32_t);
    return row_bytes != 0 ? static_cast<std::size_t>(row_bytes) : static_cast<std::size_t>(groups) * bytes_a_scale();
  }
  /// Bytes from row 0's scale of group 0 to that of `group`.
  HEDDLE_HOST_DEVICE std::size_t group_offset(int group) const {
    const auto g = static_cast<std::size_t>(group);
    const std::size_t column = sizeof(std::uint32_t) * static_cast<std::size_t>(padded_rows);
    if (order == ScaleOrder::row_major) return g * bytes_a_scale();
    return order == ScaleOrder::column_major ? g * column : g / groups_a_word * column + g % groups_a_word;
  }
  HEDDLE_HOST_DEVICE std::size_t offset(std::size_t row, int group) const { return row * row_stride() + group_offset(group); }

  /// Bytes behind the scale of `group` that are written as 0 with it.
  HEDDLE_HOST_DEVICE int zeros_behind(int group) const {
    if (order != ScaleOrder::packed || group != groups - 1) return 0;
    return groups_a_word - 1 - group % groups_a_word;
  }
  /// What the scales of a buffer of `rows` rows take.
  HEDDLE_HOST_DEVICE std::size_t bytes(std::size_t rows) const {
    if (order == ScaleOrder::row_major) return rows * row_stride();
    const int columns = order == ScaleOrder::column_major ? groups : (groups + groups_a_word - 1) / groups_a_word;
    return sizeof(std::uint32_t) * static_cast<std::size_t>(columns) * static_cast<std::size_t>(padded_rows);
  }
};

}  // namespace heddle
