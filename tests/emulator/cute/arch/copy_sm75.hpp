// In the place of CuTe's header: movmatrix.
#pragma once

#include "emulator/device.hpp"

namespace cute {

/// The transposed 8 x 8 matrix of 16-bit values: a lane has two neighbours of row lane / 4, before and after.
struct SM75_U32x1_MOVM_T {
  static void copy(const std::uint32_t& from, std::uint32_t& to) {
    const std::uint64_t* all = heddle::emulator::exchange(from, 32);
    const int row = heddle::emulator::lane() / 4;
    const int column = heddle::emulator::lane() % 4 * 2;
    const auto element = [&](int r, int c) { return static_cast<std::uint32_t>(all[4 * r + c / 2] >> (c % 2 * 16)) & 0xFFFFu; };
    to = element(column, row) | element(column + 1, row) << 16;
  }
};

}  // namespace cute
