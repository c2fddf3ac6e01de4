// In the place of CuTe's header: stmatrix.
#pragma once

#include "emulator/device.hpp"

#include "cute/arch/copy_sm80.hpp"

namespace cute {

/// Four 8 x 8 matrices of 16-bit values, of which a lane has two neighbours of row lane / 4 each; row r of matrix m goes to where
/// lane 8 m + r says.
struct SM90_U32x4_STSM_N {
  static void copy(const std::uint32_t& first, const std::uint32_t& second, const std::uint32_t& third, const std::uint32_t& fourth,
                   uint128_t& to) {
    const std::uint32_t mine[] = {first, second, third, fourth};
    const int lane = heddle::emulator::lane();
    for (int matrix = 0; matrix < 4; ++matrix) {
      const std::uint64_t* places = heddle::emulator::exchange(reinterpret_cast<std::uint64_t>(&to), 32);
      auto* row = reinterpret_cast<std::byte*>(places[8 * matrix + lane / 4]);
      std::memcpy(row + lane % 4 * 4, &mine[matrix], 4);
    }
    heddle::emulator::exchange(0, 32);
  }
};

}  // namespace cute
