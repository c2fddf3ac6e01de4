// NVML, the driver's management library, found at run time. Names and numbers are those of nvml.h, a stable interface of C.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "doctor/library.hpp"

namespace heddle::doctor {

/// Why clocks are below their most (nvmlClocksEventReason*).
enum SlowReason : std::uint64_t {
  idle = 0x1,
  set_clocks = 0x2,
  power_cap = 0x4,
  hardware = 0x8,
  sync_boost = 0x10,
  thermal = 0x20,
  hardware_thermal = 0x40,
  power_brake = 0x80,
  display_clock = 0x100,
};

/// Devices are its handles; null is taken, of which nothing is told. What it does not tell is empty.
class Nvml {
 public:
  explicit Nvml(const char* file = "libnvidia-ml.so.1");
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Why it tells nothing; empty: it does.
  const std::string& missing() const { return missing_; }
  std::optional<std::string> driver() const;
  /// The GPU with this PCI bus id; null where it knows none.
  void* device(const std::string& bus_id) const;

  std::optional<unsigned> sm_clock_mhz(void* device) const;
  std::optional<unsigned> memory_clock_mhz(void* device) const;
  std::optional<unsigned> most_sm_clock_mhz(void* device) const;
  std::optional<std::uint64_t> slow_reasons(void* device) const;  ///< bits of SlowReason
  /// Of a function that tells milliwatts.
  std::optional<double> watts(const char* function, void* device) const;
  std::optional<double> power_limit_w(void* device) const { return watts("nvmlDeviceGetPowerManagementLimit", device); }

  /// False where the function is missing or did not do it.
  template <class... Arguments>
  bool call(const char* function, void* device, Arguments... arguments) const {
    return missing_.empty() && device != nullptr && library_.call(function, device, arguments...);
  }
  /// What a function tells through its last argument.
  template <class Value, class... Arguments>
  std::optional<Value> value(const char* function, void* device, Arguments... arguments) const {
    Value told{};
    return call(function, device, arguments..., &told) ? std::optional<Value>(told) : std::nullopt;
  }

 private:
  Library library_;
  std::string missing_;
};

}  // namespace heddle::doctor
