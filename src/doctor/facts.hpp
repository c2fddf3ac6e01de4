// What `heddle doctor` knows of a machine. Values alone: probes.hpp fills them, findings.hpp judges them, so that machines that
// nobody has can be judged too. What a probe could not learn is empty.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace heddle::doctor {

/// The processor, memory and limits that this process lives under. Sizes in bytes.
struct HostFacts {
  int cpus = 0;                               ///< that this process may run on
  std::optional<double> cpu_quota;            ///< CPUs' worth of time that the container grants; empty: no limit
  std::uint64_t memory_total = 0;             ///< of the machine
  std::uint64_t memory_available = 0;         ///< that can be taken now, within the container's limit
  std::optional<std::uint64_t> memory_limit;  ///< of the container; empty: none
  std::optional<std::uint64_t> shm_bytes;     ///< size of /dev/shm; empty: there is none
  std::optional<std::uint64_t> locked_bytes;  ///< ulimit -l; empty: no limit
  std::optional<std::uint64_t> open_files;    ///< ulimit -n; empty: no limit
  std::optional<std::uint64_t> processes;     ///< ulimit -u, threads included; empty: no limit
};

/// What the environment of this process asks of the CUDA runtime.
struct EnvironmentFacts {
  std::optional<std::string> visible_devices;        ///< CUDA_VISIBLE_DEVICES
  std::optional<std::string> mps_thread_percentage;  ///< CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
  bool launch_blocking = false;                      ///< CUDA_LAUNCH_BLOCKING is set and not 0
  bool mps = false;                                  ///< an MPS daemon's control pipe is there
};

/// How this command was built. CUDA's versions count as CUDA does: 13000 is 13.0.
struct BuildFacts {
  bool cuda = false;  ///< has the CUDA part
  int runtime = 0;    ///< CUDA runtime that is linked in; 0 without the CUDA part
};

/// Driver and libraries, found at run time.
struct DriverFacts {
  std::optional<std::string> kernel_module;  ///< /proc/driver/nvidia/version is there; its version
  bool library = false;                      ///< libcuda.so.1 was found
  int error = 0;                             ///< of cuInit; 0 done
  int cuda = 0;                              ///< newest CUDA that the driver serves; 0 not known
  std::optional<std::string> version;        ///< as NVML tells it, e.g. 580.65.06
  bool management = false;                   ///< NVML (libnvidia-ml.so.1) was found and answers
  std::optional<int> nccl;                   ///< version of libnccl.so.2: 22809 is 2.28.9
};

/// One GPU as the driver sees it, and from `free_bytes` on as NVML does.
struct GpuFacts {
  int index = 0;  ///< as this process numbers them
  std::string name, bus_id;
  int major = 0, minor = 0;  ///< compute capability
  int sms = 0;
  std::uint64_t memory_bytes = 0;
  int shared_bytes = 0;        ///< of a block
  int shared_optin_bytes = 0;  ///< of a block that asks for more
  bool virtual_memory = false;
  bool descriptors = false;  ///< memory can be handed to other processes as file descriptors
  bool cooperative = false;  ///< cooperative launches

  std::optional<std::uint64_t> free_bytes;
  std::optional<unsigned> sm_clock_mhz, most_sm_clock_mhz, memory_clock_mhz;
  std::optional<double> power_limit_w, usual_power_limit_w;
  std::optional<std::uint64_t> slow_reasons;   ///< NVML's bits for why clocks are below their most
  std::optional<int> compute_mode;             ///< NVML's: 0 default, 2 prohibited, 3 one process
  std::optional<bool> divided;                 ///< MIG is on
  std::optional<std::uint64_t> memory_errors;  ///< uncorrected, since the driver was loaded
  std::optional<int> links, links_up;          ///< NVLinks
};

/// Of two GPUs, in one direction.
struct PairFacts {
  int from = 0, to = 0;
  bool access = false;   ///< `from` can reach the memory of `to`
  bool atomics = false;  ///< and the link carries native atomics
};

/// A test that ran, or the reason why not.
struct TestFacts {
  enum class State : std::uint8_t { passed, failed, skipped };
  std::string name;  ///< e.g. "host: words"
  State state = State::skipped;
  double seconds = 0;
  std::string message;  ///< what was seen; of a skipped test why
};

struct MachineFacts {
  HostFacts host;
  EnvironmentFacts environment;
  BuildFacts build;
  DriverFacts driver;
  std::vector<GpuFacts> gpus;
  std::vector<PairFacts> pairs;  ///< all ordered ones
  std::vector<TestFacts> tests;
};

}  // namespace heddle::doctor
