// A product for the emulator: a case, its inputs in memory as the loader and the ways leave them, and the sums that it must give,
// said again from the definition of the formats.
#pragma once

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "emulator/device.hpp"
// The kernel, compiled for the host with the emulator's headers in the place of CUDA's and CuTe's.
#include "experts/sm90/product_kernel.cuh"

#include "emulator/emulator.hpp"
#include "experts/sm90/host_weights.hpp"
#include "experts_support.hpp"
#include "formats/rows.hpp"

namespace heddle::sm90 {

/// What the kernel calls its dynamic shared memory.
alignas(1024) inline std::byte memory[most_shared_bytes];

using emulator::Products;
using heddle::testing::OwnedWeights;
using heddle::testing::pick;
using heddle::testing::Random;
using heddle::testing::random_weights;
using heddle::testing::size;

/// One product to try.
struct Case {
  WeightKind kind = WeightKind::mxfp4;
  bool paired = false;
  int rows = 64;  ///< of the weights; of gate alone where paired
  int cols = 128;
  std::vector<int> counts = {1};
  TokenScales scaling = TokenScales::by_128;
  ScaleFormat format = ScaleFormat::ue8m0;
  bool step_exponents = false;
};

/// A case's inputs in memory, as the loader and the ways leave them, and the sums they must give.
struct Inputs {
  Case wanted;
  WeightPlan plan;
  std::vector<std::vector<OwnedWeights>> stored;  ///< by expert: gate and up, or down
  std::vector<std::byte> chunks;
  std::vector<float> row_scales;
  std::size_t expert_stride = 0;
  std::vector<std::byte> values;
  std::vector<std::byte> scales;
  std::size_t value_stride = 0;
  std::size_t scale_stride = 0;
  int tokens = 0;

  Inputs(Random& random, const Case& c) : wanted(c) {
    plan = {c.kind, c.paired, c.step_exponents, c.paired ? 2 * c.rows : c.rows, c.cols};
    tokens = std::accumulate(c.counts.begin(), c.counts.end(), 0);
    for (std::size_t expert = 0; expert < c.counts.size(); ++expert) add_expert(random);
    draw_tokens(random);
  }

  int group() const { return wanted.scaling == TokenScales::by_32 ? 32 : 128; }
  int groups() const { return wanted.scaling == TokenScales::none ? 0 : (wanted.cols + group() - 1) / group(); }

  /// As boxes of so many rows, or one by one: 0.
  TokenRows rows(int box_rows) const {
    TokenRows rows{values.data(), value_stride, scales.data(), scale_stride, wanted.scaling, wanted.format, RowMap{}, 0, {}};
    if (box_rows == 0) return rows;
    rows.readable = tokens;
    const std::size_t row_bytes = size(wanted.cols) * (plan.shape().operand == Operand::e4m3 ? 1 : 2);
    const emulator::RowBoxes boxes{values.data(), value_stride, row_bytes, tokens, box_rows};
    static_assert(sizeof boxes <= sizeof rows.tensor);
    std::memcpy(rows.tensor.words, &boxes, sizeof boxes);
    return rows;
  }
  OrderedMatrix matrix() const { return {plan, chunks.data(), expert_stride, row_scales.empty() ? nullptr : row_scales.data()}; }

  float token(int row, int k) const {
    const std::byte* at = values.data() + size(row) * value_stride;
    if (plan.shape().operand == Operand::e4m3) return from_e4m3(static_cast<std::uint8_t>(at[k]));
    bf16 value;
    std::memcpy(&value, at + 2 * k, sizeof value);
    return to_float(value);
  }
  float token_scale(int row, int index) const {
    if (wanted.scaling == TokenScales::none) return 1.0f;
    const std::byte* at = scales.data() + size(row) * scale_stride;
    if (wanted.format == ScaleFormat::ue8m0) return from_ue8m0(static_cast<std::uint8_t>(at[index]));
    float scale;
    std::memcpy(&scale, at + 4 * size(index), sizeof scale);
    return scale;
  }

  /// The f32 sum of one token and one weight row, in the engine's order.
  float sum(const WeightMatrix& weights, const std::vector<float>& wide, int weight_row, int row) const {
    const int depth = plan.shape().operand == Operand::e4m3 ? 32 : 16;
    const int promotion = wanted.scaling == TokenScales::by_32 ? 32 : 128;
    const bool scaled = weights.kind == WeightKind::fp8_block || weights.kind == WeightKind::nvfp4;
    float total = 0.0f;
    for (int begin = 0; begin < wanted.cols; begin += promotion) {
      float partial = 0.0f;
      for (int from = begin; from < begin + promotion; from += depth) {
        double exact = partial;
        for (int k = from; k < std::min(from + depth, wanted.cols); ++k) {
          exact += static_cast<double>(wide[size(k)]) * static_cast<double>(token(row, k));
        }
        partial = static_cast<float>(exact);
      }
      const float scale = token_scale(row, begin / promotion);
      const float both = scaled ? scale * promotion_scale(weights, weight_row, begin / 128) : scale;
      total = std::fma(partial, both, total);
    }
    return total;
  }

 private:
  void add_expert(Random& random) {
    std::vector<OwnedWeights> one;
    for (int half = 0; half < (wanted.paired ? 2 : 1); ++half) {
      one.push_back(random_weights(random, wanted.kind, wanted.rows, wanted.cols));
      if (wanted.kind == WeightKind::nvfp4) one.back().view.tensor_scale = half == 0 ? 0.37f : 1.25f;
      if (wanted.step_exponents) spread(random, one.back());
    }
    const auto whole = [](const WeightMatrix& m) { return stored_part(m, {0, m.rows}, {0, m.cols}, "whole"); };
    const std::string names[2] = {"gate", "up"};
    const OrderedWeights ordered = order_weights(plan, {{whole(one.front().view), whole(one.back().view)}}, names);
    expert_stride = (ordered.chunks.size() + 255) / 256 * 256;
    chunks.insert(chunks.end(), ordered.chunks.begin(), ordered.chunks.end());
    chunks.resize((stored.size() + 1) * expert_stride);
    row_scales.insert(row_scales.end(), ordered.row_scales.begin(), ordered.row_scales.end());
    stored.push_back(std::move(one));
  }
  /// Scales of a row's steps far from each other, so that one base a row does not do.
  void spread(Random& random, OwnedWeights& weights) const {
    const std::size_t groups_a_row = size(wanted.cols + 31) / 32;
    for (std::size_t i = 0; i < weights.scales.size(); ++i) {
      const int step = static_cast<int>(i % groups_a_row) / 4;
      weights.scales[i] = static_cast<std::byte>(115 + 7 * (step % 3) + pick(random, 0, 3));
    }
  }
  void draw_tokens(Random& random) {
    const bool e4m3 = plan.shape().operand == Operand::e4m3;
    const std::size_t value_bytes = size(wanted.cols) * (e4m3 ? 1 : 2);
    value_stride = (value_bytes + 15) / 16 * 16 + 16;  // a gap, whose bytes are NaN in either format
    values.assign(size(tokens) * value_stride, std::byte{0xFF});
    std::normal_distribution<float> normal;
    for (int row = 0; row < tokens; ++row) {
      for (int k = 0; k < wanted.cols; ++k) {
        std::byte* at = values.data() + size(row) * value_stride;
        if (e4m3 || wanted.scaling != TokenScales::none) {
          const std::uint8_t code = to_e4m3(100.0f * normal(random));
          const bf16 wide = to_bf16(from_e4m3(code));
          if (e4m3) {
            at[k] = static_cast<std::byte>(code);
          } else {
            std::memcpy(at + 2 * k, &wide, 2);
          }
        } else {
          const bf16 value = to_bf16(normal(random));
          std::memcpy(at + 2 * k, &value, 2);
        }
      }
    }
    const std::size_t scale_bytes = size(groups()) * (wanted.format == ScaleFormat::f32 ? 4 : 1);
    scale_stride = (scale_bytes + 3) / 4 * 4 + 4;
    scales.assign(size(tokens) * scale_stride, std::byte{0xFF});
    for (int row = 0; row < tokens; ++row) {
      for (int group = 0; group < groups(); ++group) {
        std::byte* at = scales.data() + size(row) * scale_stride;
        const float scale = 0.001f * static_cast<float>(pick(random, 1, 100));
        if (wanted.format == ScaleFormat::ue8m0) {
          at[group] = static_cast<std::byte>(pick(random, 118, 124));
        } else {
          std::memcpy(at + 4 * group, &scale, 4);
        }
      }
    }
  }
};

/// All sums of an expert's matrices: [rows of the flat list, columns], gate then up where paired.
inline std::vector<float> all_sums(const Inputs& in) {
  const int width = in.plan.rows;
  std::vector<float> sums(size(in.tokens) * size(width));
  std::vector<float> wide(size(in.wanted.cols));
  int first = 0;
  for (std::size_t expert = 0; expert < in.stored.size(); ++expert) {
    const int count = in.wanted.counts[expert];
    for (std::size_t half = 0; half < in.stored[expert].size(); ++half) {
      const WeightMatrix& weights = in.stored[expert][half].view;
      for (int n = 0; n < in.wanted.rows; ++n) {
        widen_row(weights, n, 0, in.wanted.cols, wide.data());
        for (int row = first; row < first + count; ++row) {
          sums[size(row) * size(width) + half * size(in.wanted.rows) + size(n)] = in.sum(weights, wide, n, row);
        }
      }
    }
    first += count;
  }
  return sums;
}

template <class Shape>
void run(const ProductCall& call, int ctas, unsigned seed, Products products) {
  std::memset(memory, 0xFF, sizeof memory);
  emulator::shared_memory() = memory;
  emulator::launch({ctas, Shape::threads, seed, products}, [&] { product_kernel<Shape>(call); });
}

}  // namespace heddle::sm90
