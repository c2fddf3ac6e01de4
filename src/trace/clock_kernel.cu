#include <cuda_runtime.h>

#include "signal/ptx.cuh"
#include "trace/cuda_clock.hpp"

namespace heddle::trace {

namespace {

/// The longest of some steps: looks that miss a change make it longer, never shorter.
__device__ std::uint64_t step_of_clock() {
  constexpr int steps = 32;
  constexpr int most_looks = 1 << 20;  // a clock that stands still ends nobody
  std::uint64_t longest = 0;
  std::uint64_t last = ptx::nanoseconds();
  for (int i = 0; i < steps; ++i) {
    std::uint64_t now = last;
    for (int looks = 0; now == last && looks < most_looks; ++looks) now = ptx::nanoseconds();
    if (i > 0 && now - last > longest) longest = now - last;  // the first look came somewhere in a step
    last = now;
  }
  return longest;
}

__global__ void tell_time(ClockWords* words, std::uint64_t patience) {
  const std::uint64_t begin = ptx::nanoseconds();
  const std::uint64_t step = step_of_clock();
  if (step == 0) return;  // it stands still, and with it the patience below
  ptx::store_relaxed_system(&words->step, step);
  for (std::uint64_t number = 0; number < clock_questions; ++number) {
    while (ptx::load_acquire_system(&words->asked) <= number) {
      if (ptx::nanoseconds() - begin > patience) return;
    }
    ptx::store_relaxed_system(words->told.data() + number, ptx::nanoseconds());
  }
}

}  // namespace

cudaError_t launch_tell_time(ClockWords* words, std::uint64_t patience, cudaStream_t stream) {
  tell_time<<<1, 1, 0, stream>>>(words, patience);
  return cudaGetLastError();
}

}  // namespace heddle::trace
