// The host's time of a GPU's clock, by questions and answers. Arithmetic alone; cuda_clock.hpp asks.
//
// Source: F. Cristian, "Probabilistic clock synchronization", 1989; intervals that all samples share, as in K. Marzullo's thesis,
// 1984.
#pragma once

#include <cstdint>
#include <vector>

namespace heddle::trace {

/// The host asked, the device read its clock, the host saw the answer. Nanoseconds, each of its own clock.
struct ClockSample {
  std::int64_t asked = 0;
  std::int64_t device = 0;
  std::int64_t answered = 0;
};

/// Samples in quick succession, and the longest time for which the device's clock stands still.
struct ClockSamples {
  std::vector<ClockSample> samples;
  std::int64_t step = 0;
};

/// What a reading of the device's clock lacks to the host's time when it was read: `offset`, wrong by `uncertainty` at most.
struct ClockOffset {
  std::int64_t device = 0;  ///< about when, by the device's clock
  double offset = 0;
  double uncertainty = 0;
};

/// By what all samples allow. The reading lies between question and answer, the device's own time up to a step after the reading;
/// meanwhile the clocks drift apart by less than 200 parts in a million. Throws Error (kind fault) where the samples contradict
/// each other, InputError where there are none.
ClockOffset offset_of(const ClockSamples& samples);

/// Both clocks run at constant rates from one calibration to the other.
class ClockFit {
 public:
  ClockFit(const ClockOffset& before, const ClockOffset& after);
  /// Host's nanoseconds.
  std::int64_t host_time(std::int64_t device) const;
  /// Of host_time between the two calibrations, nanoseconds.
  std::int64_t uncertainty() const;

 private:
  ClockOffset before_, after_;
};

}  // namespace heddle::trace
