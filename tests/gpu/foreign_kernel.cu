#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "gpu/foreign_kernel.hpp"
#include "gpu/waiting.hpp"
#include "heddle/error.hpp"

namespace heddle {

using cuda::check;

namespace {

constexpr std::uint64_t longest_nanoseconds = 20'000'000'000;

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// A CTA with all of an SM's shared memory, so that no other fits beside it.
__global__ void hold(volatile int* told) {
  told[1 + blockIdx.x] = 1;
  const std::uint64_t since = nanoseconds();
  while (told[0] == 0 && nanoseconds() - since < longest_nanoseconds) __nanosleep(2000);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

int sms_of(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

ForeignKernel::ForeignKernel(int device, int sms) : device_(device) {
  const cuda::DeviceScope scope(device);
  void* memory = nullptr;
  const std::size_t words = static_cast<std::size_t>(sms) + 1;
  check(cudaHostAlloc(&memory, words * sizeof(int), cudaHostAllocMapped), "memory that host and GPU see");
  std::fill_n(static_cast<int*>(memory), words, 0);
  told_ = static_cast<volatile int*>(memory);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  check(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory of the foreign kernel");
  hold<<<static_cast<unsigned>(sms), 1, static_cast<std::size_t>(bytes), stream_>>>(told_);
  check(cudaGetLastError(), "launch of the foreign kernel");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (int cta = 0; cta < sms;) {
    if (told_[1 + cta] != 0) {
      ++cta;
    } else if (std::chrono::steady_clock::now() > end) {
      let_go();
      throw Error(ErrorKind::fault, "CTA " + std::to_string(cta) + " of the foreign kernel found no free SM");
    }
  }
}

void ForeignKernel::let_go() {
  told_[0] = 1;
  wait_for(stream_, "the foreign kernel", std::chrono::seconds(30));
}

ForeignKernel::~ForeignKernel() {
  const cuda::DeviceScope scope(device_);
  told_[0] = 1;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
  cudaFreeHost(const_cast<int*>(told_));
}

}  // namespace heddle
