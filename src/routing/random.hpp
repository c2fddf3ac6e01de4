// splitmix64: small, seeded, and with the same bits everywhere (the standard library's distributions
// differ between implementations).
#pragma once

#include <cstdint>

namespace heddle {

inline constexpr std::uint64_t splitmix64_step = 0x9E3779B97F4A7C15u;

/// splitmix64's output for state x after one step; also a hash of x.
constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += splitmix64_step;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    const std::uint64_t value = splitmix64(state_);
    state_ += splitmix64_step;
    return value;
  }

  /// Uniform in [0, bound), bound >= 1, without bias: the incomplete round of 2^64 is drawn again.
  std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t incomplete = (0 - bound) % bound;
    std::uint64_t value = next();
    while (value < incomplete) value = next();
    return value % bound;
  }

  /// Uniform multiples of 2^-24 in [2^-24, 1].
  float positive_unit() { return static_cast<float>((next() >> 40) + 1) * 0x1p-24f; }

 private:
  std::uint64_t state_;
};

}  // namespace heddle
