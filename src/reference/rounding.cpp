#include "reference/rounding.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "formats/codes.hpp"

namespace heddle::reference {

namespace {
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

struct GroupMaximum {
  float amax = 1e-10f;
  bool has_nan = false;
  bool has_infinity = false;
};

GroupMaximum maximum(std::span<const float> group) {
  GroupMaximum result;
  for (const float value : group) {
    result.has_nan = result.has_nan || std::isnan(value);
    result.has_infinity = result.has_infinity || std::isinf(value);
    result.amax = std::fmax(result.amax, std::fabs(value));  // fmax passes over NaN
  }
  return result;
}

float next_power_of_two(float value) {
  int exponent = 0;
  const float mantissa = std::frexp(value, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

/// Calls act(first, values) for each group of a row; the last one may be short.
template <class Action>
void for_each_group(std::span<const float> values, std::size_t size, const Action& act) {
  for (std::size_t first = 0; first < values.size(); first += size) {
    act(first, values.subspan(first, std::min(size, values.size() - first)));
  }
}
}  // namespace

bf16 round_to_bf16(double value) {
  // Round to odd on the way: an inexact f32 whose last bit is set can never look like a bf16 tie.
  const auto nearest = static_cast<float>(value);
  const double back = nearest;
  if (back == value || !std::isfinite(nearest)) {
    return to_bf16(nearest);
  }
  const float truncated = std::fabs(back) > std::fabs(value) ? std::nextafter(nearest, 0.0f) : nearest;
  return to_bf16(std::bit_cast<float>(std::bit_cast<std::uint32_t>(truncated) | 1u));
}

void round_to_fp8(std::span<const float> values, const Quantisation& quantisation, std::span<double> out) {
  for_each_group(values, static_cast<std::size_t>(quantisation.group), [&](std::size_t first, std::span<const float> group) {
    const GroupMaximum found = maximum(group);
    const float exact = found.amax / 448.0f;
    const float finite = quantisation.scale == ScaleFormat::ue8m0 ? next_power_of_two(exact) : exact;
    const float scale = found.has_infinity ? nan : finite;
    for (std::size_t i = 0; i < group.size(); ++i) {
      out[first + i] = static_cast<double>(from_e4m3(to_e4m3(group[i] / scale))) * scale;
    }
  });
}

void round_to_nvfp4(std::span<const float> values, float global_scale, std::span<float> out) {
  for_each_group(values, 16, [&](std::size_t first, std::span<const float> group) {
    const GroupMaximum found = maximum(group);
    const float finite = std::fmax(from_e4m3(to_e4m3(found.amax / (6.0f * global_scale))), 0x1p-9f);
    const float scale = found.has_infinity || found.has_nan ? nan : finite;
    const float divisor = scale * global_scale;
    for (std::size_t i = 0; i < group.size(); ++i) {
      out[first + i] = from_e2m1(to_e2m1(group[i] / divisor)) * scale * global_scale;
    }
  });
}

void round_to_operand(std::span<const float> values, Activation activation, const Quantisation& quantisation,
                      std::span<double> out) {
  if (activation == Activation::fp8) {
    round_to_fp8(values, quantisation, out);
    return;
  }
  std::transform(values.begin(), values.end(), out.begin(), [](float value) { return to_float(to_bf16(value)); });
}

}  // namespace heddle::reference
