#include "exchange/cuda_counters.hpp"

#include <fmt/format.h>

#include "exchange/counters.hpp"
#include "group/cuda_driver.hpp"

namespace heddle {

using cuda::check;

namespace {

/// Another thread may be capturing a graph, in a mode in which calls like ours would spoil it.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "capture mode of a thread"); }
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(const OutsideOfCaptures&) = delete;
  OutsideOfCaptures& operator=(const OutsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

DeviceTallies::DeviceTallies(int device, const TallyPlan& plan, int local_ranks) : device_(device), plan_(plan) {
  const cuda::DeviceScope scope(device);
  const std::size_t bytes = sizeof(Tally) * static_cast<std::size_t>(plan.size());
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMalloc(reinterpret_cast<void**>(&tallies_), bytes * static_cast<std::size_t>(local_ranks)), "memory for counters");
  check(cudaMallocHost(reinterpret_cast<void**>(&copied_), bytes), "pinned memory for counters");
  check(cudaMemsetAsync(tallies_, 0, bytes * static_cast<std::size_t>(local_ranks), stream_), "zeroing of counters");
  check(cudaStreamSynchronize(stream_), "zeroing of counters");
}

DeviceTallies::~DeviceTallies() {
  cudaFreeHost(copied_);
  cudaFree(tallies_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::span<const Tally> DeviceTallies::copy(int local) {
  // A call writes for a moment once in many microseconds: two copies in a row seldom meet that moment.
  constexpr int most_copies = 10000;
  const auto size = static_cast<std::size_t>(plan_.size());
  const std::span<const Tally> all(copied_, size);
  const auto dispatches = all.first(static_cast<std::size_t>(plan_.dispatch_size()));
  const auto combines = all.subspan(static_cast<std::size_t>(plan_.combine_at()));
  const cuda::DeviceScope scope(device_);
  const OutsideOfCaptures outside;
  for (int i = 0; i < most_copies; ++i) {
    check(cudaMemcpyAsync(copied_, tallies_ + static_cast<std::size_t>(local) * size, size * sizeof(Tally), cudaMemcpyDeviceToHost,
                          stream_),
          "copying of counters");
    check(cudaStreamSynchronize(stream_), "copying of counters");
    if (is_whole(dispatches) && is_whole(combines)) return all;
  }
  throw Error(ErrorKind::fault,
              fmt::format("the counters of local rank {} on GPU {} were being written in each of {} copies; expected a call "
                          "to write them once. Do two calls of one exchange run at once?",
                          local, device_, most_copies));
}

ExchangeCounters DeviceTallies::read(int local, const Placement& placement, int local_experts) {
  const std::lock_guard lock(reading_);
  return counters_of(copy(local), plan_, placement, local_experts);
}

}  // namespace heddle
