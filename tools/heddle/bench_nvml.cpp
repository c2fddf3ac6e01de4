#include "bench_nvml.hpp"

namespace heddle::tool {

GpuReading reading_of(const Nvml& nvml, void* device) {
  constexpr int temperature_of_gpu = 0;  // nvmlTemperatureSensors_t
  GpuReading reading;
  reading.power_w = nvml.watts("nvmlDeviceGetPowerUsage", device);
  if (const auto millijoules = nvml.value<unsigned long long>("nvmlDeviceGetTotalEnergyConsumption", device))
    reading.energy_j = static_cast<double>(*millijoules) / 1000.0;
  reading.sm_clock_mhz = nvml.sm_clock_mhz(device);
  reading.memory_clock_mhz = nvml.memory_clock_mhz(device);
  reading.temperature_c = nvml.value<unsigned>("nvmlDeviceGetTemperature", device, temperature_of_gpu);
  reading.throttle = nvml.slow_reasons(device);
  return reading;
}

}  // namespace heddle::tool
