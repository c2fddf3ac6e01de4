// Names and numbers of CUDA's driver API (cuda.h), of NVML (nvml.h) and of NCCL (nccl.h). All three are stable interfaces of C.
#include <fstream>
#include <string>

#include "doctor/library.hpp"
#include "doctor/nvml.hpp"
#include "doctor/probes.hpp"

namespace heddle::doctor {

namespace {

/// CUdevice_attribute.
enum Attribute : int {
  shared_bytes = 8,
  sms = 16,
  major_version = 75,
  minor_version = 76,
  cooperative = 95,
  shared_optin_bytes = 97,
  virtual_memory = 102,
  descriptors = 103,
};
constexpr int native_atomics = 3;  // CUdevice_P2PAttribute

std::optional<std::string> kernel_module() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  while (file >> word) {  // "NVRM version: NVIDIA UNIX ... Kernel Module  580.65.06  ..."
    if (word.find_first_not_of("0123456789.") == std::string::npos && word.find('.') != std::string::npos) return word;
  }
  return file.is_open() ? std::optional<std::string>("(version not told)") : std::nullopt;
}

int attribute_of(const Library& cuda, int which, int device) {
  int value = 0;
  return cuda.call("cuDeviceGetAttribute", &value, which, device) ? value : 0;
}

GpuFacts gpu_of(const Library& cuda, int index) {
  GpuFacts gpu;
  gpu.index = index;
  int device = 0;
  if (!cuda.call("cuDeviceGet", &device, index)) return gpu;
  char text[256] = {};
  if (cuda.call("cuDeviceGetName", &text[0], 256, device)) gpu.name = text;
  if (cuda.call("cuDeviceGetPCIBusId", &text[0], 256, device)) gpu.bus_id = text;
  std::size_t bytes = 0;
  if (cuda.call("cuDeviceTotalMem_v2", &bytes, device)) gpu.memory_bytes = bytes;
  gpu.major = attribute_of(cuda, major_version, device);
  gpu.minor = attribute_of(cuda, minor_version, device);
  gpu.sms = attribute_of(cuda, sms, device);
  gpu.shared_bytes = attribute_of(cuda, shared_bytes, device);
  gpu.shared_optin_bytes = attribute_of(cuda, shared_optin_bytes, device);
  gpu.virtual_memory = attribute_of(cuda, virtual_memory, device) != 0;
  gpu.descriptors = attribute_of(cuda, descriptors, device) != 0;
  gpu.cooperative = attribute_of(cuda, cooperative, device) != 0;
  return gpu;
}

PairFacts pair_of(const Library& cuda, int from, int to) {
  PairFacts pair{from, to, false, false};
  int a = 0, b = 0, yes = 0;
  if (!cuda.call("cuDeviceGet", &a, from) || !cuda.call("cuDeviceGet", &b, to)) return pair;
  pair.access = cuda.call("cuDeviceCanAccessPeer", &yes, a, b) && yes != 0;
  pair.atomics = cuda.call("cuDeviceGetP2PAttribute", &yes, native_atomics, a, b) && yes != 0;
  return pair;
}

void probe_driver(MachineFacts& facts) {
  const Library cuda("libcuda.so.1");
  DriverFacts& driver = facts.driver;
  driver.library = cuda.is_there();
  if (!driver.library) return;
  int count = 0;
  driver.error = cuda.status("cuInit", 0U);
  if (cuda.call("cuDriverGetVersion", &count)) driver.cuda = count;
  if (driver.error != 0 || !cuda.call("cuDeviceGetCount", &count)) return;
  for (int gpu = 0; gpu < count; ++gpu) facts.gpus.push_back(gpu_of(cuda, gpu));
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from != to) facts.pairs.push_back(pair_of(cuda, from, to));
    }
  }
}

/// What NVML tells of a GPU.
void describe(const Nvml& nvml, GpuFacts& gpu) {
  void* device = nvml.device(gpu.bus_id);
  gpu.sm_clock_mhz = nvml.sm_clock_mhz(device);
  gpu.most_sm_clock_mhz = nvml.most_sm_clock_mhz(device);
  gpu.memory_clock_mhz = nvml.memory_clock_mhz(device);
  gpu.power_limit_w = nvml.power_limit_w(device);
  gpu.usual_power_limit_w = nvml.watts("nvmlDeviceGetPowerManagementDefaultLimit", device);
  gpu.slow_reasons = nvml.slow_reasons(device);
  gpu.compute_mode = nvml.value<int>("nvmlDeviceGetComputeMode", device);
  constexpr int uncorrected = 1, since_load = 0;
  if (const auto errors = nvml.value<unsigned long long>("nvmlDeviceGetTotalEccErrors", device, uncorrected, since_load))
    gpu.memory_errors = *errors;
  unsigned now = 0, after_reset = 0;
  if (nvml.call("nvmlDeviceGetMigMode", device, &now, &after_reset)) gpu.divided = now != 0;
  unsigned long long memory[3] = {};  // nvmlMemory_t: total, free, used
  if (nvml.call("nvmlDeviceGetMemoryInfo", device, &memory[0])) gpu.free_bytes = memory[1];
  constexpr unsigned most_links = 18;  // NVML_NVLINK_MAX_LINKS
  for (unsigned link = 0; link < most_links; ++link) {
    const auto up = nvml.value<int>("nvmlDeviceGetNvLinkState", device, link);
    if (!up) continue;  // this GPU has no such link
    gpu.links = gpu.links.value_or(0) + 1;
    gpu.links_up = gpu.links_up.value_or(0) + (*up != 0 ? 1 : 0);
  }
}

}  // namespace

void probe_gpus(MachineFacts& facts) {
  facts.driver.kernel_module = kernel_module();
  probe_driver(facts);
  const Nvml nvml;
  facts.driver.management = nvml.missing().empty();
  facts.driver.version = nvml.driver();
  for (GpuFacts& gpu : facts.gpus) describe(nvml, gpu);
  const Library nccl("libnccl.so.2");
  int version = 0;
  if (nccl.call("ncclGetVersion", &version)) facts.driver.nccl = version;
}

}  // namespace heddle::doctor
