// Layers for the tests of the reference: weights drawn as codes, together with the exact numbers that
// the codes stand for, decoded here from the definitions of the formats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "heddle/experts.hpp"
#include "reference/reference.hpp"

namespace heddle::test {

using Random = std::mt19937;

/// A seed that a failing run can be repeated with: HEDDLE_SEED=n.
inline unsigned announced_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  std::printf("HEDDLE_SEED=%u\n", seed);
  return seed;
}

inline int draw(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

/// A small float format without infinities: sign, exponent, mantissa.
struct SmallFloat {
  int exponent_bits, mantissa_bits, bias;

  int codes() const { return 1 << (exponent_bits + mantissa_bits); }  ///< non-negative ones
  double value(int code) const {
    const int magnitude = code % codes();
    const int exponent = magnitude >> mantissa_bits;
    const double fraction = std::ldexp(magnitude & ((1 << mantissa_bits) - 1), -mantissa_bits);
    const double absolute = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
    return code >= codes() ? -absolute : absolute;
  }
};
inline constexpr SmallFloat e4m3{4, 3, 7};  // its code 0x7F is NaN: never drawn and never decoded here
inline constexpr SmallFloat e2m1{2, 1, 1};

/// A weight matrix: the bytes of a checkpoint, and what they mean.
struct Matrix {
  WeightMatrix form;  ///< without its spans
  std::vector<std::byte> values, scales;
  std::vector<double> exact;  ///< [rows, cols]

  WeightMatrix view() const {
    WeightMatrix result = form;
    result.values = values;
    result.scales = scales;
    return result;
  }
  double at(int row, int col) const {
    return exact[static_cast<std::size_t>(row) * static_cast<std::size_t>(form.cols) + static_cast<std::size_t>(col)];
  }
};

inline void append(std::vector<std::byte>& bytes, const void* data, std::size_t size) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + size);
}

/// A bf16 matrix of given numbers, which must be exact in bf16.
inline Matrix bf16_matrix(int rows, int cols, const std::vector<double>& numbers) {
  Matrix matrix;
  matrix.form.rows = rows;
  matrix.form.cols = cols;
  matrix.exact = numbers;
  for (const double number : numbers) {
    const bf16 value = to_bf16(static_cast<float>(number));
    append(matrix.values, &value, sizeof value);
  }
  return matrix;
}

/// Zeros, but for the listed entries.
struct Entry {
  int row, col;
  double value;
};
inline Matrix sparse_matrix(int rows, int cols, const std::vector<Entry>& entries) {
  std::vector<double> numbers(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols), 0.0);
  for (const Entry& entry : entries) {
    numbers[static_cast<std::size_t>(entry.row) * static_cast<std::size_t>(cols) + static_cast<std::size_t>(entry.col)] =
        entry.value;
  }
  return bf16_matrix(rows, cols, numbers);
}

/// The scale of each group of a matrix: draws a code, appends it, returns its value.
inline double draw_scale(Matrix& matrix, Random& random) {
  if (matrix.form.kind == WeightKind::fp8_block && matrix.form.block_scale == ScaleFormat::f32) {
    const float scale = std::ldexp(1.0f + std::ldexp(static_cast<float>(draw(random, 0, 4095)), -12), -11);
    append(matrix.scales, &scale, sizeof scale);
    return scale;
  }
  if (matrix.form.kind == WeightKind::nvfp4) {
    const auto code = static_cast<std::uint8_t>(draw(random, 24, 40));  // 1/16 .. 1/4
    append(matrix.scales, &code, 1);
    return e4m3.value(code) * matrix.form.tensor_scale;
  }
  const int exponent = matrix.form.kind == WeightKind::mxfp4 ? draw(random, -6, -4) : draw(random, -12, -10);
  const auto code = static_cast<std::uint8_t>(exponent + 127);
  append(matrix.scales, &code, 1);
  return std::ldexp(1.0, exponent);
}

inline Matrix random_bf16_matrix(int rows, int cols, Random& random) {
  std::vector<double> numbers;
  std::normal_distribution<float> gauss(0.0f, 0.1f);
  for (int i = 0; i < rows * cols; ++i) {
    numbers.push_back(to_float(to_bf16(gauss(random))));
  }
  return bf16_matrix(rows, cols, numbers);
}

/// Random codes and scales of any kind, sized so that a few hundred terms give results around 1.
inline Matrix random_matrix(WeightKind kind, int rows, int cols, Random& random) {
  if (kind == WeightKind::bf16) {
    return random_bf16_matrix(rows, cols, random);
  }
  Matrix matrix;
  matrix.form.kind = kind;
  matrix.form.rows = rows;
  matrix.form.cols = cols;
  matrix.form.block_scale = draw(random, 0, 1) == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0;
  matrix.form.tensor_scale = kind == WeightKind::nvfp4 ? 0.3f : 1.0f;
  const int group_rows = kind == WeightKind::fp8_block ? 128 : 1;
  const int group_cols = kind == WeightKind::fp8_block ? 128 : (kind == WeightKind::nvfp4 ? 16 : 32);
  std::vector<double> scales;
  const int groups = (cols + group_cols - 1) / group_cols;
  for (int i = 0; i < (rows + group_rows - 1) / group_rows * groups; ++i) {
    scales.push_back(draw_scale(matrix, random));
  }
  const bool four_bits = kind == WeightKind::mxfp4 || kind == WeightKind::nvfp4;
  int low = 0;
  for (int row = 0; row < rows; ++row) {
    for (int col = 0; col < cols; ++col) {
      const double scale = scales[static_cast<std::size_t>(row / group_rows * groups + col / group_cols)];
      const int code = four_bits ? draw(random, 0, 15) : draw(random, 0, 1) * 128 + draw(random, 0, 0x7E);
      matrix.exact.push_back((four_bits ? e2m1 : e4m3).value(code) * scale);
      const auto byte = static_cast<std::uint8_t>(four_bits ? low | code << 4 : code);
      if (!four_bits || col % 2 == 1) {
        append(matrix.values, &byte, 1);
      }
      low = code;
    }
  }
  return matrix;
}

struct Expert {
  Matrix gate, up, down;
  ExpertWeights view() const { return {gate.view(), up.view(), down.view()}; }
};

inline Expert random_expert(WeightKind kind, int hidden, int intermediate, Random& random) {
  return {random_matrix(kind, intermediate, hidden, random), random_matrix(kind, intermediate, hidden, random),
          random_matrix(kind, hidden, intermediate, random)};
}

/// A layer and a batch that own their data.
struct Case {
  int hidden = 64, intermediate = 64, tokens = 0, topk = 1;
  std::vector<Expert> experts;
  std::vector<bf16> hidden_states;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<int> rank_of;
  std::vector<Expert> shared;  ///< none or one
  int shared_intermediate = 0;
  std::vector<float> shared_gate;

  std::vector<bf16> run(const ReferenceOptions& options) const {
    SharedExpert shared_expert;
    ReferenceInput input;
    input.hidden = hidden;
    input.intermediate = intermediate;
    input.experts = static_cast<int>(experts.size());
    input.tokens = tokens;
    input.topk = topk;
    input.hidden_states = hidden_states;
    input.ids = ids;
    input.weights = weights;
    input.expert = [this](int id) { return experts[static_cast<std::size_t>(id)].view(); };
    input.rank_of = rank_of;
    if (!shared.empty()) {
      shared_expert = {shared[0].view(), shared_intermediate, shared_gate};
      input.shared = &shared_expert;
    }
    return reference_layer(input, options);
  }
};

inline std::vector<bf16> random_hidden(int count, Random& random) {
  std::normal_distribution<float> gauss;
  std::vector<bf16> states;
  for (int i = 0; i < count; ++i) {
    states.push_back(to_bf16(gauss(random)));
  }
  return states;
}

struct Sizes {
  int hidden, intermediate, experts, tokens, topk, ranks;
};

/// Everything drawn; about one choice in eight is -1. topk must not be above the experts.
inline Case random_case(const Sizes& sizes, WeightKind kind, Random& random) {
  Case result;
  result.hidden = sizes.hidden;
  result.intermediate = sizes.intermediate;
  result.tokens = sizes.tokens;
  result.topk = sizes.topk;
  for (int e = 0; e < sizes.experts; ++e) {
    result.experts.push_back(random_expert(kind, sizes.hidden, sizes.intermediate, random));
    result.rank_of.push_back(draw(random, 0, sizes.ranks - 1));
  }
  result.hidden_states = random_hidden(sizes.tokens * sizes.hidden, random);
  std::vector<std::int32_t> all;
  for (int e = 0; e < sizes.experts; ++e) {
    all.push_back(e);
  }
  for (int token = 0; token < sizes.tokens; ++token) {
    std::shuffle(all.begin(), all.end(), random);
    for (int choice = 0; choice < sizes.topk; ++choice) {
      result.ids.push_back(draw(random, 0, 7) == 0 ? -1 : all[static_cast<std::size_t>(choice)]);
      result.weights.push_back(std::uniform_real_distribution<float>(0.05f, 1.0f)(random));
    }
  }
  return result;
}

inline void add_shared(Case& layer, WeightKind kind, int intermediate, bool gated, Random& random) {
  layer.shared.push_back(random_expert(kind, layer.hidden, intermediate, random));
  layer.shared_intermediate = intermediate;
  std::normal_distribution<float> gauss(0.0f, 0.1f);
  for (int h = 0; gated && h < layer.hidden; ++h) {
    layer.shared_gate.push_back(gauss(random));
  }
}

}  // namespace heddle::test
