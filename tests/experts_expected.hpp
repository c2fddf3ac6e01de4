// Pairs of an expert layer in float64, for the tests of the engines.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "experts_support.hpp"

namespace heddle::testing {

/// A weight matrix as float64 [rows, cols], all scales in it.
inline std::vector<double> widened(const WeightMatrix& weights) {
  std::vector<double> out;
  out.reserve(size(weights.rows) * size(weights.cols));
  std::vector<float> row(size(weights.cols));
  for (int n = 0; n < weights.rows; ++n) {
    widen_row(weights, n, 0, weights.cols, row.data());
    for (int k = 0; k < weights.cols; ++k) {
      out.push_back(static_cast<double>(row[size(k)]) * promotion_scale(weights, n, k / 128));
    }
  }
  return out;
}

/// Pairs of one layer in float64, rounding where docs/numerics.md says so.
class Expected {
 public:
  Expected(const Layer& layer, const ExpertOptions& options) : options_(options) {
    for (const ExpertWeights& expert : layer.views) {
      experts_.push_back({widened(expert.gate), widened(expert.up), widened(expert.down)});
    }
  }

  std::vector<double> pair(int expert, std::vector<float> x, float weight) const {
    const Widened& weights = experts_[size(expert)];
    x = quantised(std::move(x));
    const std::vector<double> gate = product(weights.gate, x);
    const std::vector<double> up = product(weights.up, x);
    std::vector<float> v(gate.size());
    for (std::size_t i = 0; i < v.size(); ++i) {
      double g = gate[i];
      double u = up[i];
      if (options_.clamp.has_value()) {
        g = std::min<double>(g, *options_.clamp);
        u = std::clamp<double>(u, -*options_.clamp, *options_.clamp);
      }
      const float silu = static_cast<float>(g) / (1.0f + static_cast<float>(std::exp(-g)));
      v[i] = silu * static_cast<float>(u) * weight;
    }
    return product(weights.down, quantised(std::move(v)));
  }

 private:
  struct Widened {
    std::vector<double> gate;
    std::vector<double> up;
    std::vector<double> down;
  };

  std::vector<float> quantised(std::vector<float> values) const {
    if (options_.activation == Activation::bf16) {
      for (float& value : values) {
        value = to_float(to_bf16(value));
      }
      return values;
    }
    std::vector<std::uint8_t> codes(values.size());
    std::vector<std::byte> scales(values.size() * 4);
    quantise_fp8(values.data(), static_cast<int>(values.size()), options_.quantisation, codes.data(), scales.data());
    widen_fp8(codes.data(), scales.data(), static_cast<int>(values.size()), options_.quantisation, values.data());
    return values;
  }

  /// Rounded to bf16.
  static std::vector<double> product(const std::vector<double>& weights, const std::vector<float>& in) {
    std::vector<double> out;
    for (auto row = weights.begin(); row != weights.end(); row += static_cast<std::ptrdiff_t>(in.size())) {
      const double sum = std::inner_product(in.begin(), in.end(), row, 0.0);
      out.push_back(to_float(to_bf16(static_cast<float>(sum))));
    }
    return out;
  }

  ExpertOptions options_;
  std::vector<Widened> experts_;
};

inline std::vector<float> widened_row(const OwnedRows& rows, const ExpertOptions& options, int row, int hidden) {
  RowFormat wire;
  wire.wire = rows.view.format == Activation::fp8 ? Wire::fp8 : Wire::bf16;
  wire.hidden = hidden;
  wire.quantisation = options.quantisation;
  std::vector<float> out(size(hidden));
  widen_row(rows.bytes.data() + size(row) * wire.row_bytes(), wire, out.data());
  return out;
}

}  // namespace heddle::testing
