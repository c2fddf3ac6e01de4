#include "trace/cuda_clock.hpp"

#include <fmt/format.h>

#include <atomic>
#include <chrono>

#include "group/cuda_driver.hpp"
#include "group/cuda_pinned.hpp"
#include "group/cuda_stream.hpp"
#include "heddle/error.hpp"

namespace heddle::trace {

using cuda::check;

namespace {

/// A kernel under way ends by its own deadline at the latest, before its words are freed.
struct AtRest {
  cudaStream_t stream;
  ~AtRest() { cudaStreamSynchronize(stream); }
};

constexpr std::int64_t second = 1'000'000'000;
constexpr std::int64_t host_patience = 5 * second;
constexpr std::uint64_t kernel_patience = 2 * second;

ClockSample ask(ClockWords& words, std::size_t number, int device) {
  ClockSample sample;
  const std::atomic_ref<std::uint64_t> told(words.told[number]);
  sample.asked = host_nanoseconds();
  std::atomic_ref<std::uint64_t>(words.asked).store(number + 1);
  while (told.load() == 0) {
    if (host_nanoseconds() - sample.asked < host_patience) continue;
    throw Error(ErrorKind::fault, fmt::format("calibration of GPU {}'s clock: no answer to question {} of {} within {} s; "
                                              "is another kernel holding the GPU, or does its clock stand still?",
                                              device, number + 1, clock_questions, host_patience / second));
  }
  sample.answered = host_nanoseconds();
  sample.device = static_cast<std::int64_t>(told.load());
  return sample;
}

}  // namespace

std::int64_t host_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ClockSamples sample_clock(int device) {
  const cuda::DeviceScope scope(device);
  const cuda::PinnedArray<ClockWords> memory(1, "memory for questions to a GPU's clock");
  const cuda::OwnStream stream;
  const AtRest at_rest{stream};
  ClockWords& words = *memory.data();
  check(launch_tell_time(&words, kernel_patience, stream), "calibration of a GPU's clock");
  ClockSamples samples;
  for (std::size_t number = 0; number < clock_questions; ++number) samples.samples.push_back(ask(words, number, device));
  check(cudaStreamSynchronize(stream), "calibration of a GPU's clock");
  samples.step = static_cast<std::int64_t>(words.step);
  return samples;
}

}  // namespace heddle::trace
