// Weight matrices one value at a time: the plain meaning of the storage formats.
#include <cstring>

#include <fmt/format.h>

#include "experts/words.hpp"
#include "formats/codes.hpp"
#include "heddle/error.hpp"
#include "heddle/experts.hpp"

namespace heddle {
namespace {

constexpr int block = 128;

/// What a kind stores: bits a value, columns that share a scale (0: none, or a block's).
struct Storage {
  int bits;
  int group;
};

Storage storage(WeightKind kind) {
  switch (kind) {
    case WeightKind::bf16:
      return {16, 0};
    case WeightKind::fp8_block:
      return {8, 0};
    case WeightKind::mxfp4:
      return {4, 32};
    case WeightKind::nvfp4:
      return {4, 16};
    case WeightKind::mxfp8:
      return {8, 32};
  }
  throw InputError(fmt::format("unknown weight kind {}", static_cast<int>(kind)));
}

std::size_t ceil_div(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit; }

std::size_t scale_bytes(const WeightMatrix& weights) {
  const auto rows = static_cast<std::size_t>(weights.rows);
  const auto cols = static_cast<std::size_t>(weights.cols);
  if (weights.kind == WeightKind::fp8_block) {
    const std::size_t width = weights.block_scale == ScaleFormat::f32 ? sizeof(float) : 1;
    return ceil_div(rows, block) * ceil_div(cols, block) * width;
  }
  const int group = storage(weights.kind).group;
  return group == 0 ? 0 : rows * ceil_div(cols, static_cast<std::size_t>(group));
}

std::uint8_t byte_at(std::span<const std::byte> bytes, std::size_t index) { return static_cast<std::uint8_t>(bytes[index]); }

/// The code of a value, nibbles moved down.
std::uint8_t code_at(const WeightMatrix& weights, std::size_t index) {
  if (storage(weights.kind).bits == 8) {
    return byte_at(weights.values, index);
  }
  return static_cast<std::uint8_t>((byte_at(weights.values, index / 2) >> (index % 2 * 4)) & 0xF);
}

}  // namespace

void check_weights(const WeightMatrix& weights, int rows, int cols, const std::string& name) {
  const Storage kind = storage(weights.kind);
  if (weights.rows != rows || weights.cols != cols) {
    throw InputError(fmt::format("{}: the weight matrix is [{}, {}], but the layer's shape asks for [{}, {}]", name, weights.rows,
                                 weights.cols, rows, cols));
  }
  const std::size_t values =
      static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) * static_cast<std::size_t>(kind.bits) / 8;
  if (weights.values.size() != values) {
    throw InputError(fmt::format("{}: {} bytes of {} values for [{}, {}], but it takes {}", name, weights.values.size(),
                                 kind_text(weights.kind), rows, cols, values));
  }
  if (weights.scales.size() != scale_bytes(weights)) {
    throw InputError(fmt::format("{}: {} bytes of {} scales for [{}, {}], but it takes {}", name, weights.scales.size(),
                                 kind_text(weights.kind), rows, cols, scale_bytes(weights)));
  }
}

void widen_row(const WeightMatrix& weights, int row, int begin, int end, float* out) {
  const auto cols = static_cast<std::size_t>(weights.cols);
  const std::size_t first = static_cast<std::size_t>(row) * cols;
  const auto group = static_cast<std::size_t>(storage(weights.kind).group);
  for (auto column = static_cast<std::size_t>(begin); column < static_cast<std::size_t>(end); ++column) {
    const std::size_t index = first + column;
    const std::uint8_t scale =
        group == 0 ? 0 : byte_at(weights.scales, static_cast<std::size_t>(row) * ceil_div(cols, group) + column / group);
    switch (weights.kind) {
      case WeightKind::bf16: {
        bf16 value;
        std::memcpy(&value, weights.values.data() + 2 * index, sizeof value);
        *out++ = to_float(value);
        break;
      }
      case WeightKind::fp8_block:
        *out++ = from_e4m3(code_at(weights, index));
        break;
      case WeightKind::mxfp4:
        *out++ = from_e2m1(code_at(weights, index)) * from_ue8m0(scale);
        break;
      case WeightKind::nvfp4:
        *out++ = from_e2m1(code_at(weights, index)) * from_e4m3(scale);
        break;
      case WeightKind::mxfp8:
        *out++ = from_e4m3(code_at(weights, index)) * from_ue8m0(scale);
        break;
    }
  }
}

float promotion_scale(const WeightMatrix& weights, int row, int step) {
  if (weights.kind == WeightKind::nvfp4) {
    return weights.tensor_scale;
  }
  if (weights.kind != WeightKind::fp8_block) {
    return 1.0f;
  }
  const std::size_t blocks = ceil_div(static_cast<std::size_t>(weights.cols), block);
  const std::size_t index = static_cast<std::size_t>(row / block) * blocks + static_cast<std::size_t>(step);
  if (weights.block_scale == ScaleFormat::ue8m0) {
    return from_ue8m0(byte_at(weights.scales, index));
  }
  float scale;
  std::memcpy(&scale, weights.scales.data() + index * sizeof scale, sizeof scale);
  return scale;
}

}  // namespace heddle
