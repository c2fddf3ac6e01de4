// In the place of CuTe's header: bulk copies that arrive at some later moment.
#pragma once

#include <cstring>
#include <stdexcept>

#include "cutlass/arch/barrier.h"
#include "emulator/device.hpp"
#include "signal/ptx.cuh"

namespace heddle::emulator {

/// What a description of rows says here.
struct RowBoxes {
  const std::byte* values;
  std::size_t stride;
  std::size_t row_bytes;
  int rows;
  int box_rows;
};

/// One box, 128 bytes of each row, swizzled by the address in shared memory; zeros where there are no rows, or no more of a row.
inline void copy_box(const RowBoxes& boxes, std::byte* to, int column, int first) {
  for (int row = 0; row < boxes.box_rows; ++row) {
    for (int byte = 0; byte < 128; ++byte) {
      const std::size_t at = static_cast<std::size_t>(column + byte);
      const bool there = first + row < boxes.rows && at < boxes.row_bytes;
      const std::size_t from = static_cast<std::size_t>(first + row) * boxes.stride + at;
      const auto offset = static_cast<std::size_t>(to + row * 128 + byte - shared_memory());
      shared_memory()[offset ^ (offset >> 3 & 0x70)] = there ? boxes.values[from] : std::byte{0};
    }
  }
}

}  // namespace heddle::emulator

namespace cute {

namespace TMA {
enum class CacheHintSm90 : std::uint64_t { EVICT_LAST };
}

struct SM90_TMA_LOAD_2D {
  static void copy(const void* description, std::uint64_t* barrier, std::uint64_t, void* to, std::int32_t column,
                   std::int32_t row) {
    heddle::emulator::RowBoxes boxes;
    std::memcpy(&boxes, description, sizeof boxes);
    if (reinterpret_cast<std::uintptr_t>(to) % 1024 != 0)
      throw std::logic_error("a swizzled box that is not aligned to its pattern");
    heddle::emulator::later([=] {
      heddle::emulator::copy_box(boxes, static_cast<std::byte*>(to), column, row);
      auto& arrived = heddle::emulator::Barrier::at(barrier);
      arrived.bytes -= boxes.box_rows * 128;
      arrived.settle();
    });
  }
};

struct SM90_BULK_COPY_G2S {
  static void copy(const void* from, std::uint64_t* barrier, void* to, std::int32_t bytes) {
    heddle::ptx::load_bulk_once(to, from, static_cast<std::uint32_t>(bytes), barrier);
  }
};

}  // namespace cute
