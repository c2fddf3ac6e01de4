#include "bench_memory.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "group/cuda_driver.hpp"

namespace heddle::tool {

using cuda::check;

bool for_lack_of_memory(const Error& error) {
  return std::string(error.what()).find(cudaGetErrorName(cudaErrorMemoryAllocation)) != std::string::npos;
}

Block::Block(int device, std::size_t bytes) : device_(device), bytes_(std::max<std::size_t>(bytes, 16)) {
  const cuda::DeviceScope scope(device);
  check(cudaMalloc(&address_, bytes_), "memory of the benchmark");
  check(cudaMemset(address_, 0, bytes_), "memory of the benchmark");
  check(cudaDeviceSynchronize(), "memory of the benchmark");
}
Block::~Block() { cudaFree(address_); }

void Block::write(const void* values, std::size_t bytes) {
  const cuda::DeviceScope scope(device_);
  check(cudaMemcpy(address_, values, bytes, cudaMemcpyHostToDevice), "inputs of the benchmark");
  check(cudaDeviceSynchronize(), "inputs of the benchmark");  // copies from pageable memory may return early
}

}  // namespace heddle::tool
