#include "bench_machine.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

/// The few calls of NVML (libnvidia-ml.so.1, part of the driver) that say how a GPU is set; it is found at run time, and what
/// it does not tell is left out.
class Management {
 public:
  Management()
      : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), [](void* old) {
          if (old != nullptr) dlclose(old);
        }) {
    const auto init = find<int (*)()>("nvmlInit_v2");
    ready_ = init != nullptr && init() == 0;
  }
  ~Management() {
    const auto shutdown = find<int (*)()>("nvmlShutdown");
    if (ready_ && shutdown != nullptr) shutdown();
  }
  Management(const Management&) = delete;
  Management& operator=(const Management&) = delete;

  void describe(Json& machine, const std::string& bus_id) const {
    if (!ready_) return;
    char version[96] = {};
    const auto driver = find<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion");
    if (driver != nullptr && driver(version, sizeof version) == 0) machine["driver"] = version;
    void* device = nullptr;
    const auto by_bus = find<int (*)(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    if (by_bus == nullptr || by_bus(bus_id.c_str(), &device) != 0) return;
    const auto clock = find<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
    unsigned value = 0;
    if (clock != nullptr && clock(device, 1, &value) == 0) machine["sm_clock_mhz"] = value;
    if (clock != nullptr && clock(device, 2, &value) == 0) machine["memory_clock_mhz"] = value;
    const auto limit = find<int (*)(void*, unsigned*)>("nvmlDeviceGetPowerManagementLimit");
    if (limit != nullptr && limit(device, &value) == 0) machine["power_limit_w"] = value / 1000.0;
  }

 private:
  template <class Function>
  Function find(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library_.get(), name));
  }

  std::shared_ptr<void> library_;
  bool ready_ = false;
};

}  // namespace

std::vector<int> devices_for(const char* benchmark, int& ranks, int& gpus) {
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess || present == 0)
    throw InputError(fmt::format("heddle bench {} needs a GPU; there is none here", benchmark));
  if (gpus == 0) gpus = ranks == 0 ? present : std::min(present, ranks);
  if (gpus > present) throw InputError(fmt::format("--gpus {}: this machine has {}", gpus, present));
  if (ranks == 0) ranks = gpus;
  std::vector<int> devices(static_cast<std::size_t>(gpus));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

Json machine_of(const Lanes& lanes) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, lanes.device(0)), "properties of the first GPU");
  int driver = 0;
  cuda::check(cudaDriverGetVersion(&driver), "driver version");
  Json machine{{"gpu", properties.name}, {"gpus", lanes.gpus()}, {"sms", properties.multiProcessorCount}, {"driver_cuda", driver}};
  char bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, lanes.device(0)) == cudaSuccess) Management().describe(machine, bus_id);
  return machine;
}

void end_of_patience(const std::string& under_way, const Lanes& lanes, const std::function<void(const std::string& failed)>& save) {
  const std::string message =
      fmt::format("{} is not done after {} ms; its kernel may never end", under_way, 2 * lanes.deadline().count());
  try {
    save(message);
  } catch (const Error& error) {
    fmt::print(stderr, "heddle: {}\n", error.what());
  }
  fmt::print(stderr, "heddle: {}\n", message);
  std::fflush(nullptr);
  std::_Exit(static_cast<int>(ErrorKind::fault));
}

}  // namespace heddle::tool
