#include "bench_nvml.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

namespace heddle::tool {

namespace {

// Of nvml.h.
constexpr int sm_clock = 1;
constexpr int memory_clock = 2;
constexpr int temperature_of_gpu = 0;

std::optional<std::uint64_t> wide_number(int (*ask)(void*, unsigned long long*), void* device) {
  unsigned long long value = 0;
  if (ask == nullptr || device == nullptr || ask(device, &value) != 0) return std::nullopt;
  return value;
}

}  // namespace

Nvml::Nvml(const char* library)
    : library_(dlopen(library, RTLD_NOW | RTLD_LOCAL), [](void* old) {
        if (old != nullptr) dlclose(old);
      }) {
  if (library_ == nullptr) {
    const char* why = dlerror();
    missing_ = fmt::format("{} was not found, which comes with NVIDIA's driver: {}", library, why == nullptr ? "" : why);
    return;
  }
  const auto init = find<int (*)()>("nvmlInit_v2");
  const int status = init == nullptr ? 0 : init();
  if (init == nullptr) missing_ = fmt::format("{} has no nvmlInit_v2", library);
  if (status != 0) missing_ = fmt::format("{} could not be initialised: nvmlInit_v2 returned {}", library, status);
}

Nvml::~Nvml() {
  const auto shutdown = find<int (*)()>("nvmlShutdown");
  if (missing_.empty() && shutdown != nullptr) shutdown();
}

template <class Function>
Function Nvml::find(const char* name) const {
  return library_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library_.get(), name));
}

std::optional<std::string> Nvml::driver() const {
  char version[96] = {};
  const auto ask = find<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion");
  if (!missing_.empty() || ask == nullptr || ask(version, sizeof version) != 0) return std::nullopt;
  return version;
}

void* Nvml::device(const std::string& bus_id) const {
  void* device = nullptr;
  const auto ask = find<int (*)(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
  if (!missing_.empty() || ask == nullptr || ask(bus_id.c_str(), &device) != 0) return nullptr;
  return device;
}

std::optional<double> Nvml::number(const char* name, void* device, double unit) const {
  unsigned value = 0;
  const auto ask = find<int (*)(void*, unsigned*)>(name);
  if (ask == nullptr || device == nullptr || ask(device, &value) != 0) return std::nullopt;
  return value * unit;
}

std::optional<double> Nvml::clock(void* device, int which) const {
  unsigned value = 0;
  const auto ask = find<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
  if (ask == nullptr || device == nullptr || ask(device, which, &value) != 0) return std::nullopt;
  return value;
}

std::optional<double> Nvml::power_limit_w(void* device) const { return number("nvmlDeviceGetPowerManagementLimit", device, 1e-3); }

GpuReading Nvml::read(void* device) const {
  using Wide = int (*)(void*, unsigned long long*);
  GpuReading reading;
  reading.power_w = number("nvmlDeviceGetPowerUsage", device, 1e-3);
  if (const auto millijoules = wide_number(find<Wide>("nvmlDeviceGetTotalEnergyConsumption"), device))
    reading.energy_j = static_cast<double>(*millijoules) * 1e-3;
  reading.sm_clock_mhz = clock(device, sm_clock);
  reading.memory_clock_mhz = clock(device, memory_clock);
  unsigned celsius = 0;
  const auto temperature = find<int (*)(void*, int, unsigned*)>("nvmlDeviceGetTemperature");
  if (temperature != nullptr && device != nullptr && temperature(device, temperature_of_gpu, &celsius) == 0)
    reading.temperature_c = celsius;
  reading.throttle = wide_number(find<Wide>("nvmlDeviceGetCurrentClocksThrottleReasons"), device);
  if (!reading.throttle) reading.throttle = wide_number(find<Wide>("nvmlDeviceGetCurrentClocksEventReasons"), device);
  return reading;
}

}  // namespace heddle::tool
