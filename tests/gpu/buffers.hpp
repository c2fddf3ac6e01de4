// Device memory of the GPU tests: poisoned when it is made, with guard zones on either side, and how long tests run.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "group/cuda_driver.hpp"

namespace heddle {

using cuda::check;

/// GPUs that the tests use: all that are here, at most HEDDLE_GPUS.
inline int gpus_here() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  const char* wanted = std::getenv("HEDDLE_GPUS");
  return wanted == nullptr ? count : std::min(count, std::atoi(wanted));
}

#define SKIP_WITHOUT_GPU() \
  if (gpus_here() == 0) GTEST_SKIP() << "no GPU here"

inline std::vector<int> devices(int count) {
  std::vector<int> all;
  for (int i = 0; i < count; ++i) all.push_back(i);
  return all;
}

/// How often something is repeated: HEDDLE_LONGER times as often as a usual run does (1; 0.1 suits a sanitizer).
inline int longer(int times) {
  const char* factor = std::getenv("HEDDLE_LONGER");
  return std::max(1, static_cast<int>(times * (factor == nullptr ? 1.0 : std::atof(factor))));
}

/// Every byte of memory that nobody has written: 3.4e38 as bf16 and as f32, 2139062143 as an id.
constexpr unsigned char poison_byte = 0x7F;

/// Device memory filled from a vector, or poisoned, between two guard zones.
template <class T>
class Buffer {
 public:
  Buffer(int device, std::size_t size) : device_(device), size_(size) {
    const cuda::DeviceScope scope(device);
    check(cudaMalloc(reinterpret_cast<void**>(&memory_), size * sizeof(T) + 2 * guard_bytes), "cudaMalloc");
    check(cudaMemset(memory_, guard_byte, size * sizeof(T) + 2 * guard_bytes), "cudaMemset");
    poison();
  }
  Buffer(int device, const std::vector<T>& from) : Buffer(device, from.size()) { write(from); }
  ~Buffer() {
    if (memory_ != nullptr) cudaFree(memory_);
  }
  Buffer(Buffer&& other) noexcept : device_(other.device_), size_(other.size_), memory_(std::exchange(other.memory_, nullptr)) {}
  Buffer& operator=(Buffer&&) = delete;

  T* data() const { return reinterpret_cast<T*>(memory_ + guard_bytes); }
  std::size_t size() const { return size_; }

  /// Back when the memory holds the values. Waits for no other stream: kernels may be waiting there for each other.
  void write(const std::vector<T>& from) {
    ASSERT_LE(from.size(), size_);
    const cuda::DeviceScope scope(device_);
    check(cudaMemcpy(data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaStreamSynchronize(nullptr), "cudaMemcpy");
  }
  void poison() {
    const cuda::DeviceScope scope(device_);
    check(cudaMemset(data(), poison_byte, size_ * sizeof(T)), "cudaMemset");
    check(cudaStreamSynchronize(nullptr), "cudaMemset");
  }
  std::vector<T> read() const {
    std::vector<T> values(size_);
    check(cudaMemcpy(values.data(), data(), size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }
  /// Nobody has written before or behind the values.
  void expect_guards(const std::string& what) const {
    std::vector<unsigned char> zone(guard_bytes);
    for (const bool behind : {false, true}) {
      const std::byte* from = memory_ + (behind ? guard_bytes + size_ * sizeof(T) : 0);
      check(cudaMemcpy(zone.data(), from, guard_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
      const auto hurt = std::find_if(zone.begin(), zone.end(), [](unsigned char byte) { return byte != guard_byte; });
      EXPECT_EQ(hurt, zone.end()) << what << ": byte " << hurt - zone.begin() << " of the " << guard_bytes << " "
                                  << (behind ? "behind" : "before") << " the array was written";
    }
  }

 private:
  static constexpr std::size_t guard_bytes = 256;
  static constexpr unsigned char guard_byte = 0xA5;
  int device_;
  std::size_t size_;
  std::byte* memory_ = nullptr;
};

template <class T>
std::vector<T> read(const T* from, std::size_t size) {
  std::vector<T> values(size);
  check(cudaMemcpy(values.data(), from, size * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

}  // namespace heddle
