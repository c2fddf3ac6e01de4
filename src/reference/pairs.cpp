#include "reference/pairs.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "reference/product.hpp"
#include "reference/rounding.hpp"

namespace heddle::reference {

namespace {
/// Steps 3 and 4 without the weight: clamp and SwiGLU, every operation rounded to f32. A scale of a group is a multiple of its
/// largest v, so a rounding left out here decides ties of step 5 another way. A NaN fails every comparison and passes the clamp.
float activate(bf16 gate, bf16 up, const std::optional<float>& clamp) {
  float g = to_float(gate);
  float u = to_float(up);
  if (clamp) {
    const float limit = *clamp;
    g = g > limit ? limit : g;
    u = u > limit ? limit : (u < -limit ? -limit : u);
  }
  // f32 has no exponential above its largest number.
  const double exponential = std::exp(-static_cast<double>(g));
  const bool overflows = exponential > std::numeric_limits<float>::max();
  const float divisor = 1.0f + (overflows ? std::numeric_limits<float>::infinity() : static_cast<float>(exponential));
  const float activated = g / divisor;
  return activated * u;
}
}  // namespace

void expert_input(std::span<const bf16> hidden, Wire wire, Activation activation, const ReferenceOptions& options,
                  std::span<double> out) {
  std::vector<float> row(hidden.size());
  std::transform(hidden.begin(), hidden.end(), row.begin(), to_float);
  if (wire == Wire::fp8) {
    round_to_fp8(row, options.quantisation, out);  // the row that travels is the row that the GEMM takes
    if (activation == Activation::bf16) {
      std::transform(out.begin(), out.end(), out.begin(), [](double value) { return to_float(round_to_bf16(value)); });
    }
    return;
  }
  if (wire == Wire::nvfp4) {
    round_to_nvfp4(row, options.wire_global_scale, row);
  }
  round_to_operand(row, activation, options.quantisation, out);
}

void expert_results(const ExpertWeights& expert, std::span<const double> x, int rows, std::span<const float> weights,
                    Activation activation, const ReferenceOptions& options, std::span<bf16> results) {
  const auto count = static_cast<std::size_t>(rows);
  const auto intermediate = static_cast<std::size_t>(expert.gate.rows);
  std::vector<bf16> gate(count * intermediate);
  std::vector<bf16> up(count * intermediate);
  product(x, rows, expert.gate, gate);
  product(x, rows, expert.up, up);

  std::vector<double> activated(count * intermediate);
  std::vector<float> v(intermediate);
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t d = 0; d < intermediate; ++d) {
      const std::size_t at = r * intermediate + d;
      v[d] = activate(gate[at], up[at], options.clamp);
      v[d] = weights.empty() ? v[d] : v[d] * weights[r];
    }
    const std::span<double> row = std::span(activated).subspan(r * intermediate, intermediate);
    round_to_operand(v, activation, options.quantisation, row);
  }
  product(activated, rows, expert.down, results);
}

}  // namespace heddle::reference
