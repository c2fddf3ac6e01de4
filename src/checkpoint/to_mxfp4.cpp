// Conversion of a shared expert to mxfp4, so that it can run beside 4-bit routed experts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "formats/codes.hpp"
#include "heddle/checkpoint.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

constexpr int group = 32;
constexpr std::uint8_t scale_of_one = 127;

std::uint8_t byte_at(std::span<const std::byte> bytes, std::size_t index) { return std::to_integer<std::uint8_t>(bytes[index]); }

std::size_t at(int row, int cols, int col) {
  return static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) + static_cast<std::size_t>(col);
}

/// The f32 scale of an element, everything multiplied that the kind has.
float scale_at(const WeightMatrix& weights, int row, int col) {
  switch (weights.kind) {
    case WeightKind::bf16:
      return 1.0f;
    case WeightKind::fp8_block: {
      const std::size_t index = at(row / 128, (weights.cols + 127) / 128, col / 128);
      if (weights.block_scale == ScaleFormat::ue8m0) return from_ue8m0(byte_at(weights.scales, index));
      float scale = 0.0f;
      std::memcpy(&scale, weights.scales.data() + 4 * index, 4);
      return scale;
    }
    case WeightKind::nvfp4:
      return from_e4m3(byte_at(weights.scales, at(row, weights.cols / 16, col / 16))) * weights.tensor_scale;
    case WeightKind::mxfp4:
    case WeightKind::mxfp8:
      return from_ue8m0(byte_at(weights.scales, at(row, weights.cols / 32, col / 32)));
  }
  return 1.0f;
}

float code_at(const WeightMatrix& weights, int row, int col) {
  const std::size_t index = at(row, weights.cols, col);
  switch (weights.kind) {
    case WeightKind::bf16: {
      bf16 value;
      std::memcpy(&value, weights.values.data() + 2 * index, 2);
      return to_float(value);
    }
    case WeightKind::fp8_block:
    case WeightKind::mxfp8:
      return from_e4m3(byte_at(weights.values, index));
    case WeightKind::mxfp4:
    case WeightKind::nvfp4:
      return from_e2m1(static_cast<std::uint8_t>(byte_at(weights.values, index / 2) >> (index % 2 == 0 ? 0 : 4)));
  }
  return 0.0f;
}

/// One matrix in mxfp4, its bytes in memory of its own.
class ConvertedMatrix {
 public:
  ConvertedMatrix(const WeightMatrix& from, std::string_view name) : rows_(from.rows), cols_(from.cols) {
    if (cols_ % group != 0) {
      throw InputError(fmt::format("shared expert, {}: has {} columns; mxfp4 needs a multiple of {}", name, cols_, group));
    }
    values_.resize(at(rows_, cols_, 0) / 2);
    scales_.resize(at(rows_, cols_, 0) / group);
    for (int row = 0; row < rows_; ++row) {
      for (int begin = 0; begin < cols_; begin += group) convert_group(from, row, begin, name);
    }
  }

  WeightMatrix view() const {
    WeightMatrix matrix;
    matrix.kind = WeightKind::mxfp4;
    matrix.rows = rows_;
    matrix.cols = cols_;
    matrix.values = values_;
    matrix.scales = scales_;
    return matrix;
  }

 private:
  void convert_group(const WeightMatrix& from, int row, int begin, std::string_view name) {
    float values[group];
    float largest = 0.0f;
    for (int i = 0; i < group; ++i) {
      values[i] = code_at(from, row, begin + i) * scale_at(from, row, begin + i);
      if (!std::isfinite(values[i])) {
        throw InputError(fmt::format("shared expert, {}: row {}, column {} is {}; mxfp4 holds finite values only", name, row,
                                     begin + i, values[i]));
      }
      largest = std::max(largest, std::fabs(values[i]));
    }
    const std::uint8_t scale = largest > 0.0f ? ue8m0_at_least(largest / 6.0f) : scale_of_one;
    scales_[at(row, cols_, begin) / group] = std::byte{scale};
    const float power = from_ue8m0(scale);
    for (int i = 0; i < group; i += 2) {
      const int low = to_e2m1(values[i] / power);
      const int high = to_e2m1(values[i + 1] / power);
      values_[at(row, cols_, begin + i) / 2] = static_cast<std::byte>(low | (high << 4));
    }
  }

  int rows_, cols_;
  std::vector<std::byte> values_, scales_;
};

struct ConvertedExpert {
  ConvertedMatrix gate, up, down;
};

}  // namespace

SharedExpert to_mxfp4(const SharedExpert& shared) {
  const ExpertWeights& from = shared.weights;
  if (from.gate.kind == WeightKind::mxfp4) return shared;
  const auto converted = std::make_shared<const ConvertedExpert>(
      ConvertedExpert{ConvertedMatrix(from.gate, "gate"), ConvertedMatrix(from.up, "up"), ConvertedMatrix(from.down, "down")});
  SharedExpert result;
  result.weights = {converted->gate.view(), converted->up.view(), converted->down.view()};
  result.intermediate = shared.intermediate;
  result.gate = shared.gate;
  result.storage = converted;
  return result;
}

}  // namespace heddle
