#include "bench_kernels.hpp"
#include "group/cuda_driver.hpp"
#include "signal/ptx.cuh"

namespace heddle::tool {

namespace {

using cuda::check;

__global__ void empty() {}

__global__ void gate_kernel(const std::uint32_t* gate, std::uint32_t number) {
  const std::uint64_t since = ptx::nanoseconds();
  while (*static_cast<const volatile std::uint32_t*>(gate) < number && ptx::nanoseconds() - since < 2000000000ull) {
  }
}

__global__ void pause_kernel(std::uint64_t nanoseconds) {
  const std::uint64_t since = ptx::nanoseconds();
  while (ptx::nanoseconds() - since < nanoseconds) __nanosleep(200);
}

__global__ void work_kernel(std::uint64_t steps, float* sink) {
  float sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = static_cast<float>(threadIdx.x + static_cast<unsigned>(i));
  for (std::uint64_t step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = __fmaf_rn(sums[i], 0.999f, 0.5f);
  }
  float sum = 0;
  for (const float value : sums) sum += value;
  if (sum < 0) *sink = sum;  // never: all terms are positive, but the compiler cannot know
}

/// The output function of splitmix64: a hash of a number.
__device__ std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__global__ void fill_kernel(bf16* values, std::size_t count, std::uint64_t seed) {
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count; i += threads) {
    const std::uint64_t bits = mix(mix(seed) + i);
    const float radius = sqrtf(-2.0f * logf((static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f));
    const float angle = 6.2831853f * (static_cast<float>(bits & 0xFFFFFFu) * 0x1p-24f);
    values[i] = to_bf16(radius * cosf(angle));
  }
}

__global__ void count_kernel(const bf16* values, std::size_t count, unsigned long long* bad) {
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count; i += threads) {
    if ((values[i].bits & 0x7F80u) == 0x7F80u) atomicAdd(bad, 1ull);
  }
}

void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace

void launch_empty(int ctas, int ranks, bool cluster, cudaStream_t stream) {
  const auto* kernel = reinterpret_cast<const void*>(empty);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "clusters of the empty kernel");
  // As the exchange launches its kernels: a cluster is resident as a whole, many CTAs or ranks have to be made so.
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  if (!cluster || ranks > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (cluster) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(ctas);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(ranks));
  config.blockDim = dim3(cluster ? 256 : 512);
  config.stream = stream;
  config.attrs = attributes;
  check(cudaLaunchKernelExC(&config, kernel, nullptr), "launch of the empty kernel");
}

void launch_nothing(int ctas, int threads, cudaStream_t stream) {
  empty<<<static_cast<unsigned>(ctas), static_cast<unsigned>(threads), 0, stream>>>();
  check_launch("launch of a kernel that does nothing");
}

void launch_gate(const std::uint32_t* gate, std::uint32_t number, cudaStream_t stream) {
  gate_kernel<<<1, 1, 0, stream>>>(gate, number);
  check_launch("launch of the gate");
}

void launch_pause(std::uint64_t nanoseconds, cudaStream_t stream) {
  pause_kernel<<<1, 1, 0, stream>>>(nanoseconds);
  check_launch("launch of a pause");
}

void launch_work(int ctas, std::uint64_t steps, float* sink, cudaStream_t stream) {
  work_kernel<<<static_cast<unsigned>(ctas), 256, 0, stream>>>(steps, sink);
  check_launch("launch of other work");
}

void launch_wide_work(int ctas, std::uint64_t steps, float* sink, cudaStream_t stream) {
  constexpr int shared_bytes = 160 << 10;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(work_kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "shared memory of other work");
  work_kernel<<<static_cast<unsigned>(ctas), 256, shared_bytes, stream>>>(steps, sink);
  check_launch("launch of wide other work");
}

void fill_normal(bf16* values, std::size_t count, std::uint64_t seed, cudaStream_t stream) {
  fill_kernel<<<1024, 256, 0, stream>>>(values, count, seed);
  check_launch("launch of random values");
}

void count_not_finite(const bf16* values, std::size_t count, unsigned long long* bad, cudaStream_t stream) {
  count_kernel<<<1024, 256, 0, stream>>>(values, count, bad);
  check_launch("launch of the check");
}

}  // namespace heddle::tool
