#include "reference/weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats/codes.hpp"
#include "heddle/error.hpp"

namespace heddle::reference {

namespace {
using Table = std::array<double, 256>;

template <class Decode>
Table table_of(const Decode& decode) {
  Table table{};
  for (int code = 0; code < 256; ++code) {
    table[static_cast<std::size_t>(code)] = decode(static_cast<std::uint8_t>(code));
  }
  return table;
}
const Table e4m3_values = table_of(from_e4m3);
const Table e2m1_low = table_of([](std::uint8_t pair) { return from_e2m1(pair & 0x0F); });
const Table e2m1_high = table_of([](std::uint8_t pair) { return from_e2m1(pair >> 4); });

/// What a kind of weights looks like in memory.
struct Storage {
  int value_bits;
  int group_rows;  ///< rows that share a scale
  int group_cols;  ///< columns that share a scale; 0: there are none
  int scale_bytes;
};

Storage storage_of(const WeightMatrix& matrix) {
  switch (matrix.kind) {
    case WeightKind::bf16:
      return {16, 1, 0, 0};
    case WeightKind::fp8_block:
      return {8, 128, 128, matrix.block_scale == ScaleFormat::f32 ? 4 : 1};
    case WeightKind::mxfp4:
      return {4, 1, 32, 1};
    case WeightKind::nvfp4:
      return {4, 1, 16, 1};
    case WeightKind::mxfp8:
      return {8, 1, 32, 1};
  }
  throw InputError(fmt::format("weight kind {} is unknown", static_cast<int>(matrix.kind)));
}

std::size_t divide_up(int value, int by) { return static_cast<std::size_t>((value + by - 1) / by); }

/// Scale of a row's group of columns.
double scale_of(const WeightMatrix& matrix, const Storage& storage, int row, int group) {
  const std::size_t groups = divide_up(matrix.cols, storage.group_cols);
  const std::size_t index = static_cast<std::size_t>(row / storage.group_rows) * groups + static_cast<std::size_t>(group);
  const std::byte* at = matrix.scales.data() + index * static_cast<std::size_t>(storage.scale_bytes);
  if (storage.scale_bytes == 4) {
    float scale = 0.0f;
    std::memcpy(&scale, at, sizeof scale);  // mapped files need not be aligned
    return scale;
  }
  const auto code = std::to_integer<std::uint8_t>(*at);
  if (matrix.kind == WeightKind::nvfp4) {
    return static_cast<double>(from_e4m3(code)) * matrix.tensor_scale;
  }
  return from_ue8m0(code);
}

void widen_bf16(const std::byte* values, std::span<double> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    bf16 value;
    std::memcpy(&value, values + 2 * i, sizeof value);
    out[i] = to_float(value);
  }
}

void widen_e4m3(const std::byte* values, double scale, std::span<double> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = e4m3_values[std::to_integer<std::size_t>(values[i])] * scale;
  }
}

void widen_e2m1(const std::byte* values, double scale, std::span<double> out) {
  for (std::size_t i = 0; i < out.size(); i += 2) {
    const auto pair = std::to_integer<std::size_t>(values[i / 2]);
    out[i] = e2m1_low[pair] * scale;
    out[i + 1] = e2m1_high[pair] * scale;
  }
}
}  // namespace

void exact_row(const WeightMatrix& matrix, int row, std::span<double> out) {
  const Storage storage = storage_of(matrix);
  const std::size_t row_bytes = static_cast<std::size_t>(matrix.cols) * static_cast<std::size_t>(storage.value_bits) / 8;
  const std::byte* values = matrix.values.data() + static_cast<std::size_t>(row) * row_bytes;
  if (storage.group_cols == 0) {
    widen_bf16(values, out);
    return;
  }
  for (int first = 0; first < matrix.cols; first += storage.group_cols) {
    const double scale = scale_of(matrix, storage, row, first / storage.group_cols);
    const int size = std::min(storage.group_cols, matrix.cols - first);
    const std::span<double> group = out.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(size));
    if (storage.value_bits == 4) {
      widen_e2m1(values + first / 2, scale, group);
    } else {
      widen_e4m3(values + first, scale, group);
    }
  }
}

void check_matrix(const WeightMatrix& matrix, int rows, int cols, const std::string& what) {
  if (matrix.rows != rows || matrix.cols != cols) {
    throw InputError(fmt::format("{} is [{}, {}]; the layer's shape wants [{}, {}]", what, matrix.rows, matrix.cols, rows, cols));
  }
  const Storage storage = storage_of(matrix);
  const std::size_t values =
      static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) * static_cast<std::size_t>(storage.value_bits) / 8;
  const std::size_t scales = storage.group_cols == 0 ? 0
                                                     : divide_up(rows, storage.group_rows) * divide_up(cols, storage.group_cols) *
                                                           static_cast<std::size_t>(storage.scale_bytes);
  if (matrix.values.size() != values || matrix.scales.size() != scales) {
    throw InputError(fmt::format("{} holds {} bytes of values and {} of scales; [{}, {}] of its kind takes {} and {}", what,
                                 matrix.values.size(), matrix.scales.size(), rows, cols, values, scales));
  }
}

}  // namespace heddle::reference
