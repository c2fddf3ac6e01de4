// In the place of CuTe's header: bulk copies that arrive at some later moment.
#pragma once

#include <cstring>
#include <stdexcept>

#include "cutlass/arch/barrier.h"
#include "emulator/device.hpp"

namespace cute {

struct SM90_BULK_COPY_G2S {
  static void copy(const void* from, std::uint64_t* barrier, void* to, std::int32_t bytes) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
    if (bytes % 16 != 0 || !aligned) throw std::logic_error("a bulk copy that is not aligned to 16 bytes");
    heddle::emulator::later([=] {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
      auto& arrived = heddle::emulator::Barrier::at(barrier);
      arrived.bytes -= bytes;
      arrived.settle();
    });
  }
};

}  // namespace cute
