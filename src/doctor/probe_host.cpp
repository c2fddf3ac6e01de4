#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "doctor/probes.hpp"
#include "group/memory.hpp"
#include "group/text_reader.hpp"

namespace heddle::doctor {

namespace {

/// Numbers of a file's first line; words such as "max" end them.
std::vector<std::int64_t> numbers_in(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  TextReader reader(line);
  std::vector<std::int64_t> numbers;
  for (std::int64_t value = 0; reader.number(value);) numbers.push_back(value);
  return numbers;
}

double ratio(std::int64_t quota, std::int64_t period) { return static_cast<double>(quota) / static_cast<double>(period); }

/// CPUs' worth of time: cgroup 2 has quota and period in one file, cgroup 1 in two.
std::optional<double> cpu_quota() {
  if (const auto both = numbers_in("/sys/fs/cgroup/cpu.max"); both.size() == 2 && both[1] > 0) return ratio(both[0], both[1]);
  const auto quota = numbers_in("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), period = numbers_in("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (!quota.empty() && !period.empty() && quota[0] > 0 && period[0] > 0) return ratio(quota[0], period[0]);
  return std::nullopt;
}

std::optional<std::uint64_t> memory_limit(std::uint64_t machine) {
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const auto limit = numbers_in(path);
    if (!limit.empty() && std::cmp_less(limit[0], machine)) return static_cast<std::uint64_t>(limit[0]);
  }
  return std::nullopt;
}

std::optional<std::uint64_t> limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

HostFacts probe_host() {
  HostFacts host;
  host.cpus = usable_cpus();
  host.cpu_quota = cpu_quota();
  host.memory_total = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGE_SIZE));
  host.memory_available = available_memory();
  host.memory_limit = memory_limit(host.memory_total);
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) host.shm_bytes = shm.f_blocks * shm.f_frsize;
  host.locked_bytes = limit_of(RLIMIT_MEMLOCK);
  host.open_files = limit_of(RLIMIT_NOFILE);
  host.processes = limit_of(RLIMIT_NPROC);
  return host;
}

EnvironmentFacts probe_environment() {
  EnvironmentFacts environment;
  environment.visible_devices = variable("CUDA_VISIBLE_DEVICES");
  environment.mps_thread_percentage = variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
  const auto blocking = variable("CUDA_LAUNCH_BLOCKING");
  environment.launch_blocking = blocking && !blocking->empty() && *blocking != "0";
  std::error_code ignored;
  const std::filesystem::path pipes = variable("CUDA_MPS_PIPE_DIRECTORY").value_or("/tmp/nvidia-mps");
  environment.mps = std::filesystem::exists(pipes / "control", ignored);
  return environment;
}

}  // namespace heddle::doctor
