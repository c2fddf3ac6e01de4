#include "reference/product.hpp"

#include <cstddef>
#include <vector>

#include "reference/rounding.hpp"
#include "reference/weights.hpp"

namespace heddle::reference {

namespace {
/// Two neighbours in K: what every x86-64 and Arm vector unit adds at once.
using Lanes = double __attribute__((vector_size(16)));
constexpr std::size_t lanes = 2;
constexpr std::size_t panel_rows = 4;

Lanes load(const double* at) { return Lanes{at[0], at[1]}; }

/// out[r * stride + n] for Rows rows of x and the four rows of a panel, both [.., depth] row-major.
template <std::size_t Rows>
void dot_products(const double* x, const double* panel, std::size_t depth, bf16* out, std::size_t stride) {
  Lanes sums[Rows][panel_rows] = {};
  for (std::size_t k = 0; k < depth; k += lanes) {
    for (std::size_t r = 0; r < Rows; ++r) {
      const Lanes left = load(x + r * depth + k);
      for (std::size_t n = 0; n < panel_rows; ++n) {
        sums[r][n] += left * load(panel + n * depth + k);
      }
    }
  }
  for (std::size_t r = 0; r < Rows; ++r) {
    for (std::size_t n = 0; n < panel_rows; ++n) {
      out[r * stride + n] = round_to_bf16(sums[r][n][0] + sums[r][n][1]);
    }
  }
}
}  // namespace

void product(std::span<const double> x, int rows, const WeightMatrix& weights, std::span<bf16> out) {
  const auto depth = static_cast<std::size_t>(weights.cols);
  const auto width = static_cast<std::size_t>(weights.rows);
  const auto count = static_cast<std::size_t>(rows);
  std::vector<double> panel(panel_rows * depth);
  for (std::size_t n = 0; n < width; n += panel_rows) {  // N and K are multiples of 64
    for (std::size_t i = 0; i < panel_rows; ++i) {
      exact_row(weights, static_cast<int>(n + i), std::span(panel).subspan(i * depth, depth));
    }
    std::size_t r = 0;
    for (; r + 2 <= count; r += 2) {
      dot_products<2>(x.data() + r * depth, panel.data(), depth, out.data() + r * width + n, width);
    }
    if (r < count) {
      dot_products<1>(x.data() + r * depth, panel.data(), depth, out.data() + r * width + n, width);
    }
  }
}

}  // namespace heddle::reference
