// A GPU's globaltimer on the host's steady clock: what a kernel notes lies where the host saw it happen, within the uncertainty.
#include <array>
#include <cstdio>

#include "gpu/buffers.hpp"
#include "group/cuda_pinned.hpp"
#include "trace/cuda_clock.hpp"

namespace heddle {
namespace {

using trace::ClockFit;
using trace::ClockSample;
using trace::ClockSamples;

/// A calibration's own answers, from a launch between two others, must fit what these say.
void expect_inside(const ClockFit& fit, const ClockSamples& samples) {
  for (const ClockSample& sample : samples.samples) {
    const std::int64_t at = fit.host_time(sample.device);
    EXPECT_GE(at, sample.asked - fit.uncertainty());
    EXPECT_LE(at, sample.answered + fit.uncertainty());
  }
}

TEST(TraceClockGpu, StampsLieBetweenTheHostsLooksAtItsClock) {
  SKIP_WITHOUT_GPU();
  for (int device = 0; device < gpus_here(); ++device) {
    SCOPED_TRACE(::testing::Message() << "GPU " << device);
    const ClockSamples first = trace::sample_clock(device);
    const ClockSamples between = trace::sample_clock(device);
    const ClockSamples last = trace::sample_clock(device);
    const ClockFit fit(trace::offset_of(first), trace::offset_of(last));
    std::printf("GPU %d: globaltimer's step %ld ns, aligned within %ld ns\n", device, static_cast<long>(first.step),
                static_cast<long>(fit.uncertainty()));
    expect_inside(fit, between);
  }
}

/// The host hands a question from one GPU to the other only after the first one's answer: by host's time it comes later.
TEST(TraceClockGpu, WhatOneGpuTellsFirstIsEarlierThanTheOthersAnswer) {
  SKIP_WITHOUT_GPU();
  if (gpus_here() < 2) GTEST_SKIP() << "needs two GPUs, here is one";
  const auto before = std::array{trace::offset_of(trace::sample_clock(0)), trace::offset_of(trace::sample_clock(1))};
  const ClockSamples zero = trace::sample_clock(0);
  const ClockSamples one = trace::sample_clock(1);
  const ClockSamples zero_again = trace::sample_clock(0);
  const auto after = std::array{trace::offset_of(trace::sample_clock(0)), trace::offset_of(trace::sample_clock(1))};
  const ClockFit fits[] = {{before[0], after[0]}, {before[1], after[1]}};
  const std::int64_t slack = fits[0].uncertainty() + fits[1].uncertainty();
  const auto at = [&](int gpu, const ClockSample& sample) { return fits[gpu].host_time(sample.device); };
  EXPECT_LE(at(0, zero.samples.back()), at(1, one.samples.front()) + slack);
  EXPECT_LE(at(1, one.samples.back()), at(0, zero_again.samples.front()) + slack);
}

TEST(TraceClockGpu, AKernelThatNobodyAsksEndsByItself) {
  SKIP_WITHOUT_GPU();
  const cuda::DeviceScope scope(0);
  const cuda::PinnedArray<trace::ClockWords> words(1, "words");
  check(trace::launch_tell_time(words.data(), 1'000'000, nullptr), "launch");
  check(cudaDeviceSynchronize(), "the kernel's own deadline");
  EXPECT_EQ(words.data()->told.front(), 0u);
  EXPECT_GT(words.data()->step, 0u);
}

}  // namespace
}  // namespace heddle
