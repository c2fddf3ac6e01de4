// Memory of the host that GPUs read and write, too, by the same address.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "group/cuda_driver.hpp"

namespace heddle::cuda {

/// `count` values, T{} at first. Freed with no copy or kernel of it under way: that is its owner's to see to.
template <class T>
class PinnedArray {
 public:
  PinnedArray() = default;
  PinnedArray(std::size_t count, const char* what) : size_(count) {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, std::max<std::size_t>(count, 1) * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped), what);
    values_.reset(static_cast<T*>(memory));
    std::fill_n(data(), size_, T{});
  }

  T* data() const { return values_.get(); }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  struct Free {
    void operator()(T* memory) const { cudaFreeHost(memory); }
  };
  std::size_t size_ = 0;
  std::unique_ptr<T, Free> values_;
};

}  // namespace heddle::cuda
