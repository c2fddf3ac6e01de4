// A second, slow reading of docs/numerics.md: one number at a time, codes found by searching their
// tables, sums in long double. Finite values only. It can make chosen mistakes, to see that they show.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <vector>

#include "reference_support.hpp"

namespace heddle::test {

enum class Mistake { none, gate_up_unrounded, v_unquantised, scale_rounded_down, weight_after_gemm, no_clamp, clamp_one_sided };

class Naive {
 public:
  Naive(const Case& layer, const ReferenceOptions& options, Mistake mistake = Mistake::none)
      : layer_(layer), options_(options), mistake_(mistake) {}

  std::vector<bf16> run() const {
    std::vector<bf16> output;
    for (int token = 0; token < layer_.tokens; ++token) {
      const Row sums = token_sums(token);
      for (const double sum : sums) {
        output.push_back(to_bf16(static_cast<float>(rounded_to_bf16(sum))));
      }
    }
    return output;
  }

 private:
  using Row = std::vector<double>;

  /// Nearest multiple of the last place of a format with 8 significant bits and f32's exponents.
  static double rounded_to_bf16(double value) {
    if (value == 0.0) {
      return 0.0;
    }
    const int exponent = std::max(std::ilogb(value), -126);
    return std::ldexp(std::nearbyint(std::ldexp(value, 7 - exponent)), exponent - 7);
  }

  /// The value of the nearest code; of two equally near the one with the even code.
  static double nearest(const SmallFloat& format, double value, int codes) {
    int best = 0;
    for (int code = 1; code < codes; ++code) {
      const double closer = std::fabs(format.value(code) - std::fabs(value)) - std::fabs(format.value(best) - std::fabs(value));
      if (closer < 0.0 || (closer == 0.0 && code % 2 == 0)) {
        best = code;
      }
    }
    return std::copysign(format.value(best), value);
  }

  static float largest(const Row& row, std::size_t first, std::size_t last) {
    float amax = 1e-10f;
    for (std::size_t i = first; i < last; ++i) {
      amax = std::max(amax, std::fabs(static_cast<float>(row[i])));
    }
    return amax;
  }

  Row fp8(const Row& row, int size) const {
    Row out(row.size());
    const auto group = static_cast<std::size_t>(size);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::size_t first = i / group * group;
      const float exact = largest(row, first, std::min(first + group, row.size())) / 448.0f;
      double scale = exact;
      if (options_.quantisation.scale == ScaleFormat::ue8m0) {
        const double exponent = std::log2(static_cast<double>(exact));
        scale = std::exp2(mistake_ == Mistake::scale_rounded_down ? std::floor(exponent) : std::ceil(exponent));
      }
      const float quotient = static_cast<float>(row[i]) / static_cast<float>(scale);
      out[i] = nearest(e4m3, quotient, 0x7F) * scale;
    }
    return out;
  }

  Row nvfp4(const Row& row) const {
    Row out(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::size_t first = i / 16 * 16;
      const float amax = largest(row, first, first + 16);
      const double scale = std::max(nearest(e4m3, amax / (6.0f * options_.wire_global_scale), 0x7F), std::ldexp(1.0, -9));
      const float divisor = static_cast<float>(scale) * options_.wire_global_scale;
      out[i] = static_cast<float>(nearest(e2m1, static_cast<float>(row[i]) / divisor, 8) * scale * options_.wire_global_scale);
    }
    return out;
  }

  Row operand(const Row& row, Activation activation) const {
    if (activation == Activation::fp8) {
      return fp8(row, options_.quantisation.group);
    }
    Row out;
    std::transform(row.begin(), row.end(), std::back_inserter(out), rounded_to_bf16);
    return out;
  }

  Row hidden(int token) const {
    Row row;
    for (int h = 0; h < layer_.hidden; ++h) {
      row.push_back(to_float(layer_.hidden_states[static_cast<std::size_t>(token * layer_.hidden + h)]));
    }
    return row;
  }

  static double dot(const Matrix& matrix, int n, const Row& x) {
    long double sum = 0.0L;
    for (int k = 0; k < matrix.form.cols; ++k) {
      sum += static_cast<long double>(matrix.at(n, k)) * static_cast<long double>(x[static_cast<std::size_t>(k)]);
    }
    return static_cast<double>(sum);
  }

  Row pair(const Expert& expert, const Row& x, float weight, Activation activation) const {
    Row v;
    for (int d = 0; d < expert.gate.form.rows; ++d) {
      double g = dot(expert.gate, d, x);
      double u = dot(expert.up, d, x);
      if (mistake_ != Mistake::gate_up_unrounded) {
        g = rounded_to_bf16(g);
        u = rounded_to_bf16(u);
      }
      if (options_.clamp && mistake_ != Mistake::no_clamp) {
        const double limit = *options_.clamp;
        g = std::min(g, limit);
        u = mistake_ == Mistake::clamp_one_sided ? std::min(u, limit) : std::clamp(u, -limit, limit);
      }
      const float silu = static_cast<float>(g) / (1.0f + static_cast<float>(std::exp(-g)));
      const float activated = silu * static_cast<float>(u);
      v.push_back(mistake_ == Mistake::weight_after_gemm ? activated : activated * weight);
    }
    const Row operands = mistake_ == Mistake::v_unquantised ? v : operand(v, activation);
    Row result;
    for (int h = 0; h < layer_.hidden; ++h) {
      result.push_back(rounded_to_bf16(dot(expert.down, h, operands)) * (mistake_ == Mistake::weight_after_gemm ? weight : 1.0));
    }
    return result;
  }

  Row travelled(const Row& row) const {
    switch (options_.combine_wire) {
      case Wire::fp8:
        return fp8(row, 128);
      case Wire::nvfp4:
        return nvfp4(row);
      default:
        return row;
    }
  }

  Row routed(int token, int choice) const {
    Row x = hidden(token);
    if (options_.wire == Wire::nvfp4) {
      x = nvfp4(x);
    }
    x = options_.wire == Wire::fp8 ? fp8(x, options_.quantisation.group) : operand(x, options_.activation);
    if (options_.activation == Activation::bf16) {
      x = operand(x, Activation::bf16);
    }
    const auto at = static_cast<std::size_t>(token * layer_.topk + choice);
    const float weight = options_.weight_at == WeightAt::activation ? layer_.weights[at] : 1.0f;
    return pair(layer_.experts[static_cast<std::size_t>(layer_.ids[at])], x, weight, options_.activation);
  }

  static void add(Row& sums, const Row& row, double factor) {
    for (std::size_t h = 0; h < sums.size(); ++h) {
      sums[h] += factor * row[h];
    }
  }

  /// The sum of the choices on one rank (-1: on any), as bf16 or as it is.
  Row choices(int token, int rank) const {
    Row sums(static_cast<std::size_t>(layer_.hidden), 0.0);
    for (int choice = 0; choice < layer_.topk; ++choice) {
      const auto at = static_cast<std::size_t>(token * layer_.topk + choice);
      const int id = layer_.ids[at];
      if (id < 0 || (rank >= 0 && layer_.rank_of[static_cast<std::size_t>(id)] != rank)) {
        continue;
      }
      const Row result = routed(token, choice);
      add(sums, rank < 0 ? travelled(result) : result, options_.weight_at == WeightAt::combine ? layer_.weights[at] : 1.0);
    }
    return sums;
  }

  Row token_sums(int token) const {
    Row sums(static_cast<std::size_t>(layer_.hidden), 0.0);
    if (options_.sum == Sum::slots) {
      sums = choices(token, -1);
    } else {
      const int ranks = 1 + *std::max_element(layer_.rank_of.begin(), layer_.rank_of.end());
      for (int rank = 0; rank < ranks; ++rank) {
        Row partial = choices(token, rank);
        std::transform(partial.begin(), partial.end(), partial.begin(), rounded_to_bf16);
        add(sums, travelled(partial), 1.0);
      }
    }
    if (!layer_.shared.empty()) {
      add_shared_result(token, sums);
    }
    return sums;
  }

  void add_shared_result(int token, Row& sums) const {
    const Row x = hidden(token);
    const Activation activation = options_.shared_activation.value_or(options_.activation);
    const Row result = pair(layer_.shared[0], operand(x, activation), 1.0f, activation);
    double logit = 0.0;
    for (std::size_t h = 0; h < layer_.shared_gate.size(); ++h) {
      logit += layer_.shared_gate[h] * x[h];
    }
    const float factor = layer_.shared_gate.empty() ? 1.0f : static_cast<float>(1.0 / (1.0 + std::exp(-logit)));
    for (std::size_t h = 0; h < sums.size(); ++h) {
      sums[h] += static_cast<float>(result[h]) * factor;
    }
  }

  const Case& layer_;
  const ReferenceOptions& options_;
  Mistake mistake_;
};

}  // namespace heddle::test
