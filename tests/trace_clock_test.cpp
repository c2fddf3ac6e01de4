// Alignment of a device's clock with the host's: simulated clocks whose truth is known, with steps, drift and jitter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "heddle/error.hpp"
#include "trace/clock_fit.hpp"

namespace heddle::trace {
namespace {

/// True time is the host's. The device's clock is off, runs at another rate, and goes in steps.
struct DeviceClock {
  double offset = 0;
  double rate = 1;
  std::int64_t step = 1;

  std::int64_t read(double host) const {
    const auto exact = static_cast<std::int64_t>(std::floor(host * rate + offset));
    return exact - ((exact % step) + step) % step;
  }
};

ClockSamples samples_of(const DeviceClock& clock, double host, int count, std::mt19937_64& random) {
  std::exponential_distribution<double> jitter(1.0 / 800);
  ClockSamples samples;
  samples.step = clock.step;
  for (int i = 0; i < count; ++i) {
    const double there = host + 500 + jitter(random);
    const double back = there + 500 + jitter(random);
    samples.samples.push_back({static_cast<std::int64_t>(host), clock.read(there), static_cast<std::int64_t>(std::ceil(back))});
    host = std::ceil(back) + 100;
  }
  return samples;
}

TEST(TraceClock, HostTimeIsWithinTheStatedUncertainty) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> offset(-1e12, 1e12), drift(-100e-6, 100e-6), where(0, 1);
  for (int i = 0; i < 200; ++i) {
    const std::int64_t steps[] = {1, 32, 1024};
    const DeviceClock clock{offset(random), 1 + drift(random), steps[random() % 3]};
    const double begin = 1e9, length = 5e6 + 1e9 * where(random);
    const ClockOffset before = offset_of(samples_of(clock, begin, 64, random));
    const ClockOffset after = offset_of(samples_of(clock, begin + length, 64, random));
    const ClockFit fit(before, after);
    EXPECT_LT(fit.uncertainty(), 3000 + clock.step);
    for (int k = 0; k < 50; ++k) {
      const double host = begin + 1e6 + (length - 1e6) * where(random);
      EXPECT_LE(std::abs(static_cast<double>(fit.host_time(clock.read(host))) - host), static_cast<double>(fit.uncertainty()))
          << "rate " << clock.rate << ", step " << clock.step << ", length " << length;
    }
  }
}

TEST(TraceClock, OneLateAnswerCostsNothing) {
  ClockSamples samples{{{1000, 51'500, 2000}}, 0};
  const double good = offset_of(samples).uncertainty;
  EXPECT_DOUBLE_EQ(good, 500);
  EXPECT_DOUBLE_EQ(offset_of(samples).offset, -50'000);
  samples.samples.insert(samples.samples.begin(), {1000, 51'600, 900'000});
  EXPECT_NEAR(offset_of(samples).uncertainty, good, 1);
}

TEST(TraceClock, AStepIsPartOfTheUncertainty) { EXPECT_DOUBLE_EQ(offset_of({{{1000, 51'500, 2000}}, 1000}).uncertainty, 1500); }

TEST(TraceClock, ClocksThatJumpAndNoSamplesAreErrors) {
  EXPECT_THROW(offset_of({{{1000, 51'500, 2000}, {3000, 63'500, 4000}}, 32}), Error);
  EXPECT_THROW(offset_of({}), InputError);
}

}  // namespace
}  // namespace heddle::trace
