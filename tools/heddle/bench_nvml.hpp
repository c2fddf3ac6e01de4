// What a GPU says of itself while something runs on it.
#pragma once

#include <cstdint>
#include <optional>

#include "doctor/nvml.hpp"

namespace heddle::tool {

using doctor::Nvml;

/// What a GPU says of itself at a moment; what it does not tell is empty.
struct GpuReading {
  std::optional<double> power_w;   ///< as the driver averages it, on Hopper over the second before
  std::optional<double> energy_j;  ///< since the driver was loaded
  std::optional<double> sm_clock_mhz, memory_clock_mhz, temperature_c;
  std::optional<std::uint64_t> throttle;  ///< why clocks are not the highest, NVML's bits
};

/// `device`: of nvml.device().
GpuReading reading_of(const Nvml& nvml, void* device);

}  // namespace heddle::tool
