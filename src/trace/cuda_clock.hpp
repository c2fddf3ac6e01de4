// Asks a GPU for its globaltimer, between two looks at the host's steady clock.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "trace/clock_fit.hpp"

namespace heddle::trace {

constexpr int clock_questions = 256;

/// In mapped host memory.
struct ClockWords {
  std::uint64_t asked = 0;                            ///< questions so far, by the host
  std::uint64_t step = 0;                             ///< of globaltimer, nanoseconds, by the kernel
  std::array<std::uint64_t, clock_questions> told{};  ///< by the kernel; globaltimer is never 0
};

/// One thread that answers all questions. It ends by itself once `patience` nanoseconds of its own clock are over.
cudaError_t launch_tell_time(ClockWords* words, std::uint64_t patience, cudaStream_t stream);

/// On a stream of its own; returns when its kernel has ended. Throws Error (kind fault) where the GPU does not answer in time.
ClockSamples sample_clock(int device);

/// Nanoseconds of the clock to which calibrations refer.
std::int64_t host_nanoseconds();

}  // namespace heddle::trace
