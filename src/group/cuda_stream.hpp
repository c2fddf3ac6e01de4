// A stream of one's own.
#pragma once

#include <cuda_runtime.h>

#include "group/cuda_driver.hpp"

namespace heddle::cuda {

/// On the device that is current, beside all other streams. What is queued on it when it goes runs to its end.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace heddle::cuda
