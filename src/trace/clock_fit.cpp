#include "trace/clock_fit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "heddle/error.hpp"

namespace heddle::trace {

ClockOffset offset_of(const ClockSamples& samples) {
  if (samples.samples.empty()) throw InputError("a clock cannot be calibrated without samples");
  constexpr double drift = 200e-6;
  const auto step = static_cast<double>(samples.step);
  const std::int64_t middle = samples.samples[samples.samples.size() / 2].device;
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  for (const ClockSample& sample : samples.samples) {
    const double drifted = drift * static_cast<double>(std::abs(sample.device - middle));
    least = std::max(least, static_cast<double>(sample.asked - sample.device) - step - drifted);
    most = std::min(most, static_cast<double>(sample.answered - sample.device) + drifted);
  }
  if (least > most) {
    throw Error(ErrorKind::fault, fmt::format("calibration of a GPU's clock: {} samples with a step of {} ns contradict each other "
                                              "by {:.0f} ns; one of the clocks has jumped",
                                              samples.samples.size(), samples.step, least - most));
  }
  // A reading is up to a step older than the device's own time, so its offset is up to a step larger.
  return {middle, (least + most + step) / 2, (most - least + step) / 2};
}

ClockFit::ClockFit(const ClockOffset& before, const ClockOffset& after) : before_(before), after_(after) {}

std::int64_t ClockFit::host_time(std::int64_t device) const {
  const auto between = static_cast<double>(after_.device - before_.device);
  const double rate = between > 0 ? (after_.offset - before_.offset) / between : 0.0;
  return device + std::llround(before_.offset + rate * static_cast<double>(device - before_.device));
}

std::int64_t ClockFit::uncertainty() const {
  return static_cast<std::int64_t>(std::ceil(std::max(before_.uncertainty, after_.uncertainty))) + 1;  // 1: whole nanoseconds
}

}  // namespace heddle::trace
