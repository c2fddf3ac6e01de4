#include "doctor/nvml.hpp"

#include <fmt/format.h>

namespace heddle::doctor {

namespace {

constexpr int sm_clock = 1, memory_clock = 2;  // nvmlClockType_t

}  // namespace

Nvml::Nvml(const char* file) : library_(file) {
  if (!library_.is_there()) {
    const char* why = dlerror();
    missing_ = fmt::format("{} was not found, which comes with NVIDIA's driver: {}", file, why == nullptr ? "" : why);
  } else if (const int status = library_.status("nvmlInit_v2"); status != 0) {
    missing_ = fmt::format("{} could not be initialised: nvmlInit_v2 {}", file,
                           status < 0 ? "is not in it" : fmt::format("returned {}", status));
  }
}

Nvml::~Nvml() {
  if (missing_.empty()) library_.call("nvmlShutdown");
}

std::optional<std::string> Nvml::driver() const {
  char version[96] = {};
  if (!missing_.empty() || !library_.call("nvmlSystemGetDriverVersion", &version[0], 96U)) return std::nullopt;
  return version;
}

void* Nvml::device(const std::string& bus_id) const {
  void* device = nullptr;
  if (!missing_.empty() || !library_.call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.c_str(), &device)) return nullptr;
  return device;
}

std::optional<unsigned> Nvml::sm_clock_mhz(void* device) const {
  return value<unsigned>("nvmlDeviceGetClockInfo", device, sm_clock);
}

std::optional<unsigned> Nvml::memory_clock_mhz(void* device) const {
  return value<unsigned>("nvmlDeviceGetClockInfo", device, memory_clock);
}

std::optional<unsigned> Nvml::most_sm_clock_mhz(void* device) const {
  return value<unsigned>("nvmlDeviceGetMaxClockInfo", device, sm_clock);
}

std::optional<std::uint64_t> Nvml::slow_reasons(void* device) const {
  // Of the two names drivers have the older one, the newer one, or both.
  auto bits = value<unsigned long long>("nvmlDeviceGetCurrentClocksThrottleReasons", device);
  if (!bits) bits = value<unsigned long long>("nvmlDeviceGetCurrentClocksEventReasons", device);
  return bits ? std::optional<std::uint64_t>(*bits) : std::nullopt;
}

std::optional<double> Nvml::watts(const char* function, void* device) const {
  const auto milliwatts = value<unsigned>(function, device);
  return milliwatts ? std::optional<double>(*milliwatts / 1000.0) : std::nullopt;
}

}  // namespace heddle::doctor
