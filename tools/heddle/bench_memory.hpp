// Memory of the current GPU for as long as a benchmark needs it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "group/cuda_driver.hpp"

namespace heddle::tool {

class DeviceMemory {
 public:
  /// Throws Error if there is not so much. Zeroed.
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    cuda::check(cudaMalloc(&memory_, bytes), "memory for the benchmark");
    cuda::check(cudaMemset(memory_, 0, bytes), "memory for the benchmark");
  }
  ~DeviceMemory() { cudaFree(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_;
};

}  // namespace heddle::tool
