// A stand-in for NVML with one GPU, which tells everything but its temperature.
#include <cstring>

namespace {

int gpu = 0;
unsigned long long millijoules = 5'000'000;

int tell(void* device, unsigned* to, unsigned value) {
  if (device != &gpu) return 2;
  *to = value;
  return 0;
}

}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetDriverVersion(char* version, unsigned) {
  std::strcpy(version, "580.1");
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  if (std::strcmp(bus_id, "0000:1B:00.0") != 0) return 6;
  *device = &gpu;
  return 0;
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) { return tell(device, milliwatts, 612'500); }
int nvmlDeviceGetPowerManagementLimit(void* device, unsigned* milliwatts) { return tell(device, milliwatts, 700'000); }
int nvmlDeviceGetClockInfo(void* device, int which, unsigned* megahertz) {
  return which == 1 || which == 2 ? tell(device, megahertz, which == 1 ? 1980 : 3201) : 3;
}
int nvmlDeviceGetTemperature(void*, int, unsigned*) { return 3; }
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* energy) {
  *energy = millijoules += 60'000;
  return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* reasons) {
  *reasons = 0x4;
  return 0;
}
}
