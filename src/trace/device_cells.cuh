// What a recording warp keeps in shared memory: where its next span goes, and the waits summed up so far. Of kernels built with
// HEDDLE_TRACE alone.
#pragma once

#include <cstdint>
#include <type_traits>

#include "trace/device.hpp"

namespace heddle::trace::detail {

struct WarpCell {
  std::uint64_t next = 0;  ///< address of the next record; 0: nothing is kept
  std::uint32_t left = 0;  ///< records that still fit
  std::uint32_t spans = 0;
  std::uint32_t waited[summed_waits] = {};
};
static_assert(sizeof(WarpCell) * most_warps == cell_bytes);

/// Address of this warp's.
__device__ inline std::uint32_t cell() {
  __shared__ std::uint64_t cells[most_warps][sizeof(WarpCell) / 8];
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(cells[threadIdx.x / 32]));
}

__device__ inline bool is_first_lane() { return threadIdx.x % 32 == 0; }

__device__ inline std::uint32_t load32(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ inline std::uint64_t load64(std::uint32_t address) {
  std::uint64_t value;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(address));
  return value;
}
/// Only where `does`, without a branch.
__device__ inline void store32(bool does, std::uint32_t address, std::uint32_t value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.shared.u32 [%1], %2;\n}" ::"r"(static_cast<unsigned>(does)),
               "r"(address), "r"(value));
}
__device__ inline void store64(bool does, std::uint32_t address, std::uint64_t value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.shared.u64 [%1], %2;\n}" ::"r"(static_cast<unsigned>(does)),
               "r"(address), "l"(value));
}
__device__ inline void store_global(bool does, std::uint64_t address, const std::uint32_t (&words)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(static_cast<unsigned>(does)),
      "l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]));
}

__device__ inline std::uint64_t globaltimer() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}
__device__ inline std::uint32_t clock32() { return static_cast<std::uint32_t>(clock()); }

inline constexpr std::uint32_t left_at = 8, spans_at = 12, waited_at = 16;

__device__ inline void open_cell(DeviceRecord* next, int left) {
  const std::uint32_t mine = cell();
  const bool does = is_first_lane();
  store64(does, mine, reinterpret_cast<std::uint64_t>(next));
  store32(does, mine + left_at, static_cast<std::uint32_t>(left));
  store32(does, mine + spans_at, 0);
}
__device__ inline bool is_cell_open() { return load64(cell()) != 0; }
__device__ inline std::uint32_t spans_of_cell() { return load32(cell() + spans_at); }

__device__ inline void clear_waits() {
  const std::uint32_t mine = cell() + waited_at;
  for (std::uint32_t which = 0; which < summed_waits; ++which) store32(is_first_lane(), mine + 4 * which, 0);
}
__device__ inline void add_wait(int which, std::uint32_t ticks) {
  const std::uint32_t at = cell() + waited_at + 4 * static_cast<std::uint32_t>(which);
  store32(is_first_lane(), at, load32(at) + ticks);
}

/// A DeviceRecord of a span that ends now; see there.
__device__ inline void put(std::uint32_t begin, Kind kind, unsigned what, int expert, int block, int part, int rows) {
  const std::uint32_t mine = cell();
  const std::uint64_t next = load64(mine);
  const std::uint32_t left = load32(mine + left_at);
  const auto end = static_cast<std::uint64_t>(clock64());
  const bool does = is_first_lane() && left != 0;
  const bool of_a_word = kind == Kind::wait;
  const std::uint32_t first[4] = {static_cast<std::uint32_t>(end), static_cast<std::uint32_t>(end >> 32),
                                  static_cast<std::uint32_t>(end) - begin, of_a_word ? 0 : load32(mine + waited_at)};
  const std::uint32_t second[4] = {of_a_word ? 0 : load32(mine + waited_at + 4),
                                   static_cast<std::uint32_t>(kind) | what << 8 | static_cast<std::uint32_t>(expert & 0xFFFF) << 16,
                                   static_cast<std::uint32_t>(block),
                                   static_cast<std::uint32_t>(part & 0xFFFF) | static_cast<std::uint32_t>(rows) << 16};
  store_global(does, next, first);
  store_global(does, next + 16, second);
  store64(does, mine, next + sizeof(DeviceRecord));
  store32(does, mine + left_at, left - 1);
  store32(is_first_lane(), mine + spans_at, load32(mine + spans_at) + 1);
}

}  // namespace heddle::trace::detail
