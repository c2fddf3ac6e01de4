// How tests of kernels wait that have no deadline of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "group/cuda_driver.hpp"

namespace heddle {

/// Waits for a stream, but not for ever: a kernel that hangs cannot be ended, so the whole program is, with a word about it.
inline void wait_for(cudaStream_t stream, const std::string& what, std::chrono::seconds deadline = std::chrono::seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  cudaError_t status = cudaErrorNotReady;
  while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (status == cudaErrorNotReady) {
    std::fprintf(
        stderr,
        "\nHANGS after %d s: %s\nThreads wait for each other: barrier counts, bytes that a bulk copy announces, setmaxnreg, "
        "or roles that disagree about the tasks.\n",
        static_cast<int>(deadline.count()), what.c_str());
    std::fflush(nullptr);
    std::_Exit(1);
  }
  cuda::check(status, what.c_str());
}

}  // namespace heddle
