// In the place of src/signal/ptx.cuh: what the tile engine uses of it.
#pragma once

#include "emulator/device.hpp"
#include "heddle/formats.hpp"

namespace heddle::ptx {

inline std::uint32_t to_bf16_pair(float low, float high) {
  return static_cast<std::uint32_t>(to_bf16(low).bits) | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
}

}  // namespace heddle::ptx
