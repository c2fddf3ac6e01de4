// In the place of src/signal/ptx.cuh: what the tile engine uses of it.
#pragma once

#include <cstring>
#include <stdexcept>

#include "cutlass/arch/barrier.h"
#include "emulator/device.hpp"
#include "formats/codes.hpp"
#include "heddle/formats.hpp"

namespace heddle::ptx {

inline std::uint32_t to_bf16_pair(float low, float high) {
  return static_cast<std::uint32_t>(to_bf16(low).bits) | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
}
inline std::uint32_t to_e4m3_pair(float low, float high) {
  return static_cast<std::uint32_t>(to_e4m3(low)) | static_cast<std::uint32_t>(to_e4m3(high)) << 8;
}

/// Of all lanes of the warp.
inline int uniform(int value) {
  const std::uint64_t* brought = emulator::exchange(static_cast<std::uint32_t>(value), 32);
  std::uint32_t all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<std::uint32_t>(brought[lane]);
  return static_cast<int>(all);
}

/// Fibers take turns, so nobody is between.
inline void min_relaxed_cta(std::int32_t* address, std::int32_t value) { *address = value < *address ? value : *address; }

inline int only_here(int value) { return value; }

/// Kernels follow each other here.
inline void wait_for_earlier_kernels() {}
inline void let_next_kernel_launch() {}
/// Arrives at some later moment.
inline void load_bulk_once(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  if (bytes % 16 != 0 || !aligned) throw std::logic_error("a bulk copy that is not aligned to 16 bytes");
  emulator::later([=] {
    std::memcpy(to, from, bytes);
    auto& arrived = emulator::Barrier::at(barrier);
    arrived.bytes -= static_cast<int>(bytes);
    arrived.settle();
  });
}

inline float lesser(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline float greater(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class Choose>
std::uint32_t of_each(std::uint32_t a, std::uint32_t b, const Choose& choose) {
  const auto half = [](std::uint32_t pair, int shift) { return to_float(bf16{static_cast<std::uint16_t>(pair >> shift)}); };
  return to_bf16_pair(choose(half(a, 0), half(b, 0)), choose(half(a, 16), half(b, 16)));
}
inline std::uint32_t lesser_pair(std::uint32_t a, std::uint32_t b) { return of_each(a, b, lesser); }
inline std::uint32_t greater_pair(std::uint32_t a, std::uint32_t b) { return of_each(a, b, greater); }

}  // namespace heddle::ptx
