// What NVML, the driver's management library, tells of a GPU. It is found at run time: nothing of it is needed to build or to
// start.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace heddle::tool {

/// What a GPU says of itself at a moment; what it does not tell is empty.
struct GpuReading {
  std::optional<double> power_w;   ///< as the driver averages it, on Hopper over the second before
  std::optional<double> energy_j;  ///< since the driver was loaded
  std::optional<double> sm_clock_mhz, memory_clock_mhz, temperature_c;
  std::optional<std::uint64_t> throttle;  ///< why clocks are not the highest, NVML's bits
};

class Nvml {
 public:
  explicit Nvml(const char* library = "libnvidia-ml.so.1");
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Why it tells nothing; empty: it does.
  const std::string& missing() const { return missing_; }
  std::optional<std::string> driver() const;
  /// NVML's handle of the GPU with this PCI bus id; null where it knows none.
  void* device(const std::string& bus_id) const;
  /// These take null, of which nothing is told.
  GpuReading read(void* device) const;
  std::optional<double> power_limit_w(void* device) const;

 private:
  template <class Function>
  Function find(const char* name) const;
  std::optional<double> number(const char* name, void* device, double unit) const;
  std::optional<double> clock(void* device, int which) const;

  std::shared_ptr<void> library_;
  std::string missing_;
};

}  // namespace heddle::tool
