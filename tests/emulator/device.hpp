// The words of CUDA that kernels are written in, for the host compiler.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/emulator.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes)

inline heddle::emulator::Index threadIdx;
inline heddle::emulator::Index blockIdx;
inline heddle::emulator::Index gridDim;
inline heddle::emulator::Index blockDim;

struct alignas(8) float2 {
  float x;
  float y;
};
struct alignas(8) uint2 {
  std::uint32_t x;
  std::uint32_t y;
};
struct alignas(16) float4 {
  float x;
  float y;
  float z;
  float w;
};
struct alignas(16) uint4 {
  std::uint32_t x;
  std::uint32_t y;
  std::uint32_t z;
  std::uint32_t w;
};

inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) { return {x, y}; }
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

template <class T>
T __ldg(const T* from) {
  return *from;
}

inline void __syncthreads() { heddle::emulator::meet(1, static_cast<int>(blockDim.x), "__syncthreads"); }
inline void __syncwarp() { heddle::emulator::exchange(0, 32); }

namespace heddle::emulator {
/// Shared memory as descriptors and instructions address it: in 18 bits.
inline std::byte*& shared_memory() {
  static std::byte* base = nullptr;
  return base;
}
/// The value of lane `from` of the warp.
template <class T>
T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4);
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto read = static_cast<std::uint32_t>(exchange(bits, 32)[from]);
  std::memcpy(&value, &read, sizeof value);
  return value;
}
inline int lane() { return thread() % 32; }
}  // namespace heddle::emulator

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return heddle::emulator::shuffle(value, from);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return heddle::emulator::shuffle(value, heddle::emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = heddle::emulator::lane();
  return heddle::emulator::shuffle(value, lane >= distance ? lane - distance : lane);
}

inline unsigned __ballot_sync(unsigned, bool mine) {
  const std::uint64_t* brought = heddle::emulator::exchange(mine ? 1 : 0, 32);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(brought[lane]) << lane;
  return bits;
}
inline bool __any_sync(unsigned lanes, bool mine) { return __ballot_sync(lanes, mine) != 0; }
