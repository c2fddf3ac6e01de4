#include "bench_machine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>

#include "doctor/nvml.hpp"
#include "group/cuda_driver.hpp"
#include "heddle/error.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

void describe(Json& machine, const std::string& bus_id) {
  const doctor::Nvml nvml;
  if (const auto driver = nvml.driver()) machine["driver"] = *driver;
  void* device = nvml.device(bus_id);
  if (const auto clock = nvml.sm_clock_mhz(device)) machine["sm_clock_mhz"] = *clock;
  if (const auto clock = nvml.memory_clock_mhz(device)) machine["memory_clock_mhz"] = *clock;
  if (const auto limit = nvml.power_limit_w(device)) machine["power_limit_w"] = *limit;
}

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
  if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, lanes.device(0)) == cudaSuccess) describe(machine, bus_id);
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
