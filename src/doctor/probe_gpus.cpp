// Names and numbers of CUDA's driver API (cuda.h), of NVML (nvml.h, part of the driver) and of NCCL (nccl.h). All three are
// stable interfaces of C.
#include <fstream>
#include <string>

#include "doctor/library.hpp"
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

/// NVML by its handles. Whatever it does not tell is left empty.
class Management {
 public:
  Management() : library_("libnvidia-ml.so.1"), ready_(library_.call("nvmlInit_v2")) {}
  ~Management() {
    if (ready_) library_.call("nvmlShutdown");
  }
  bool is_ready() const { return ready_; }

  std::optional<std::string> driver_version() const {
    char text[96] = {};
    return library_.call("nvmlSystemGetDriverVersion", &text[0], 96U) ? std::optional<std::string>(text) : std::nullopt;
  }

  void describe(GpuFacts& gpu) const {
    void* device = nullptr;
    if (!library_.call("nvmlDeviceGetHandleByPciBusId_v2", gpu.bus_id.c_str(), &device)) return;
    constexpr int sm_clock = 1, memory_clock = 2;
    gpu.sm_clock_mhz = number<unsigned>("nvmlDeviceGetClockInfo", device, sm_clock);
    gpu.most_sm_clock_mhz = number<unsigned>("nvmlDeviceGetMaxClockInfo", device, sm_clock);
    gpu.memory_clock_mhz = number<unsigned>("nvmlDeviceGetClockInfo", device, memory_clock);
    gpu.power_limit_w = watts("nvmlDeviceGetPowerManagementLimit", device);
    gpu.usual_power_limit_w = watts("nvmlDeviceGetPowerManagementDefaultLimit", device);
    if (const auto bits = number<unsigned long long>("nvmlDeviceGetCurrentClocksThrottleReasons", device)) gpu.slow_reasons = *bits;
    gpu.compute_mode = number<int>("nvmlDeviceGetComputeMode", device);
    constexpr int uncorrected = 1, since_load = 0;
    if (const auto errors = number<unsigned long long>("nvmlDeviceGetTotalEccErrors", device, uncorrected, since_load))
      gpu.memory_errors = *errors;
    unsigned now = 0, after_reset = 0;
    if (library_.call("nvmlDeviceGetMigMode", device, &now, &after_reset)) gpu.divided = now != 0;
    unsigned long long memory[3] = {};  // nvmlMemory_t: total, free, used
    if (library_.call("nvmlDeviceGetMemoryInfo", device, &memory[0])) gpu.free_bytes = memory[1];
    count_links(gpu, device);
  }

 private:
  template <class Number, class... Arguments>
  std::optional<Number> number(const char* function, Arguments... arguments) const {
    Number value{};
    return library_.call(function, arguments..., &value) ? std::optional<Number>(value) : std::nullopt;
  }
  std::optional<double> watts(const char* function, void* device) const {
    const auto milliwatts = number<unsigned>(function, device);
    return milliwatts ? std::optional<double>(*milliwatts / 1000.0) : std::nullopt;
  }
  void count_links(GpuFacts& gpu, void* device) const {
    constexpr unsigned most_links = 18;  // NVML_NVLINK_MAX_LINKS
    for (unsigned link = 0; link < most_links; ++link) {
      const auto up = number<int>("nvmlDeviceGetNvLinkState", device, link);
      if (!up) continue;  // this GPU has no such link
      gpu.links = gpu.links.value_or(0) + 1;
      gpu.links_up = gpu.links_up.value_or(0) + (*up != 0 ? 1 : 0);
    }
  }

  Library library_;
  bool ready_;
};

}  // namespace

void probe_gpus(MachineFacts& facts) {
  facts.driver.kernel_module = kernel_module();
  probe_driver(facts);
  const Management management;
  facts.driver.management = management.is_ready();
  if (management.is_ready()) {
    facts.driver.version = management.driver_version();
    for (GpuFacts& gpu : facts.gpus) management.describe(gpu);
  }
  const Library nccl("libnccl.so.2");
  int version = 0;
  if (nccl.call("ncclGetVersion", &version)) facts.driver.nccl = version;
}

}  // namespace heddle::doctor
