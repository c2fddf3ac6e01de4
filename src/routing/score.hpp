// What a router makes of its logits, one source for host and device. Exponential and logarithm are written out in double, where
// their errors are some 2^-45: rounded to f32 they are correct but for one value in a million, and the same everywhere.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "heddle/formats.hpp"

namespace heddle::score {

HEDDLE_HOST_DEVICE inline bool is_nan(float x) { return x != x; }

HEDDLE_HOST_DEVICE inline float exponential(float x) {
  constexpr float above_range = 89.0f, below_range = -104.0f;
  if (is_nan(x)) return x;
  if (x > above_range) return std::numeric_limits<float>::infinity();
  if (x < below_range) return 0.0f;
  constexpr double log2_e = 0x1.71547652b82fep0, ln_2_high = 0x1.62e42fee00000p-1, ln_2_low = 0x1.a39ef35793c76p-33;
  constexpr double to_whole = 0x1.8p52;  // what is added to it loses its fraction
  const double power = (static_cast<double>(x) * log2_e + to_whole) - to_whole;
  const double rest = (static_cast<double>(x) - power * ln_2_high) - power * ln_2_low;
  double sum = 1.0;
  for (int term = 11; term > 0; --term) sum = 1.0 + sum * rest * (1.0 / term);
  const auto exponent = static_cast<std::uint64_t>(static_cast<int>(power) + 1023);
  return static_cast<float>(sum * std::bit_cast<double>(exponent << 52));
}

/// log(1 + x) of a positive number in the range of f32: 2 atanh(s) for s = x / (2 + x), powers of two taken out before.
HEDDLE_HOST_DEVICE inline float log_of_one_plus(float x) {
  constexpr double ln_2 = 0x1.62e42fefa39efp-1, root_2 = 0x1.6a09e667f3bcdp0;
  const auto wide = static_cast<double>(x);
  double power = 0.0, s = wide / (2.0 + wide);
  if (wide > root_2 - 1.0) {
    const auto bits = std::bit_cast<std::uint64_t>(1.0 + wide);
    power = static_cast<double>(static_cast<int>(bits >> 52) - 1023);
    double mantissa = std::bit_cast<double>((bits & ((std::uint64_t{1} << 52) - 1)) | std::uint64_t{1023} << 52);
    if (mantissa > root_2) {
      mantissa *= 0.5;
      power += 1.0;
    }
    s = (mantissa - 1.0) / (mantissa + 1.0);
  }
  double sum = 0.0;
  for (int term = 10; term >= 0; --term) sum = sum * (s * s) + 1.0 / (2 * term + 1);
  return static_cast<float>(power * ln_2 + 2.0 * s * sum);
}

HEDDLE_HOST_DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
HEDDLE_HOST_DEVICE inline float sqrt_softplus(float x) {
  const float softplus = x <= 20.0f ? log_of_one_plus(exponential(x)) : x;  // NaN, too
  return std::sqrt(softplus);
}

/// The two best of a group; NaN counts as absent.
struct TwoBest {
  float best = -std::numeric_limits<float>::infinity();
  float second = -std::numeric_limits<float>::infinity();

  HEDDLE_HOST_DEVICE void add(float value) {
    if (value > best) {
      second = best;
      best = value;
    } else if (value > second) {
      second = value;
    }
  }
  /// By what a group of so many counts.
  HEDDLE_HOST_DEVICE float sum(int size) const { return size == 1 ? best : best + second; }
};

}  // namespace heddle::score
