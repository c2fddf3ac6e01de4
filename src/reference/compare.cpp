#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "heddle/error.hpp"
#include "reference/reference.hpp"

namespace heddle {

namespace {
constexpr double infinity = std::numeric_limits<double>::infinity();

/// |a - b|, where equal infinities and two NaN are no difference.
double difference(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) {
    return std::isnan(a) && std::isnan(b) ? 0.0 : infinity;
  }
  return a == b ? 0.0 : std::fabs(a - b);
}
}  // namespace

Comparison compare(std::span<const bf16> a, std::span<const bf16> b) {
  if (a.size() != b.size()) {
    throw InputError(fmt::format("compare: {} values against {}; both results must have the same length", a.size(), b.size()));
  }
  Comparison result;
  double squared_difference = 0.0;
  double squared_norm = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double left = to_float(a[i]);
    const double right = to_float(b[i]);
    const double distance = difference(left, right);
    const bool both_nan = std::isnan(left) && std::isnan(right);
    result.has_nan_mismatch = result.has_nan_mismatch || std::isnan(left) != std::isnan(right);
    result.different_bits += a[i].bits != b[i].bits && !both_nan ? 1 : 0;
    result.largest_difference = std::fmax(result.largest_difference, distance);
    squared_difference += distance * distance;
    squared_norm += std::isfinite(right) ? right * right : 0.0;
  }
  // Against zeros there is no scale: equal is 0, anything else infinitely far.
  result.relative_error = squared_difference == 0.0 ? 0.0 : std::sqrt(squared_difference / squared_norm);
  return result;
}

}  // namespace heddle
