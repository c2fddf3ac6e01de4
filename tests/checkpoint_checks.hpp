// What the checkpoint tests share: the meaning of a stored matrix, and refusals that a person can use.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/experts.hpp"
#include "layer_files.hpp"

namespace heddle::testing {

/// Value times all scales of every element, from the bytes of the view alone.
inline std::vector<float> meaning(const WeightMatrix& weights) {
  using layer_detail::e2m1_value;
  using layer_detail::e4m3_value;
  std::vector<float> values;
  const auto byte = [](std::span<const std::byte> bytes, int index) {
    return std::to_integer<int>(bytes[static_cast<std::size_t>(index)]);
  };
  for (int row = 0; row < weights.rows; ++row) {
    for (int col = 0; col < weights.cols; ++col) {
      const int index = row * weights.cols + col;
      const int block = row / 128 * ((weights.cols + 127) / 128) + col / 128;
      const int nibble = weights.kind == WeightKind::mxfp4 || weights.kind == WeightKind::nvfp4
                             ? byte(weights.values, index / 2) >> (col % 2 * 4) & 15
                             : 0;
      float value = 0.0f;
      switch (weights.kind) {
        case WeightKind::bf16: {
          bf16 stored;
          std::memcpy(&stored, weights.values.data() + 2 * index, 2);
          value = to_float(stored);
          break;
        }
        case WeightKind::fp8_block: {
          float scale = 0.0f;
          if (weights.block_scale == ScaleFormat::f32)
            std::memcpy(&scale, weights.scales.data() + 4 * block, 4);
          else
            scale = std::ldexp(1.0f, byte(weights.scales, block) - 127);
          value = e4m3_value(byte(weights.values, index)) * scale;
          break;
        }
        case WeightKind::mxfp4:
          value = std::ldexp(e2m1_value(nibble), byte(weights.scales, index / 32) - 127);
          break;
        case WeightKind::nvfp4:
          value = e2m1_value(nibble) * e4m3_value(byte(weights.scales, index / 16)) * weights.tensor_scale;
          break;
        case WeightKind::mxfp8:
          value = std::ldexp(e4m3_value(byte(weights.values, index)), byte(weights.scales, index / 32) - 127);
          break;
      }
      values.push_back(value);
    }
  }
  return values;
}

inline void expect_same(const WeightMatrix& weights, const MatrixValues& expected) {
  ASSERT_EQ(weights.rows, expected.rows);
  ASSERT_EQ(weights.cols, expected.cols);
  EXPECT_TRUE(meaning(weights) == expected.values);
}

inline void expect_same(const ExpertWeights& weights, const ExpertValues& expected) {
  expect_same(weights.gate, expected.gate);
  expect_same(weights.up, expected.up);
  expect_same(weights.down, expected.down);
}

/// The call must throw an InputError of one line with all these parts.
inline void expect_refusal(const std::function<void()>& call, std::initializer_list<std::string> parts) {
  try {
    call();
  } catch (const InputError& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::input);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
    return;
  }
  ADD_FAILURE() << "nothing was refused; expected: " << *parts.begin();
}

}  // namespace heddle::testing
