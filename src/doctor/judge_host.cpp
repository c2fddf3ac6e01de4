// Judgement of processor, memory and limits.
#include <fmt/format.h>

#include "doctor/judges.hpp"
#include "group/memory.hpp"

namespace heddle::doctor {

namespace {

constexpr std::uint64_t mebi = std::uint64_t{1} << 20, gibi = std::uint64_t{1} << 30;

void judge_cpus(const HostFacts& host, Findings& out) {
  if (host.cpu_quota && *host.cpu_quota < host.cpus) {
    out.push_back(
        {Severity::note, "cpu",
         fmt::format("{} CPUs, of which the container grants the time of {:.1f}", host.cpus, *host.cpu_quota),
         "ranks of the host engine take turns, and its times say little; raise the quota (docker run --cpus) to measure"});
    return;
  }
  out.push_back({Severity::ok, "cpu", fmt::format("{} CPU{}", host.cpus, host.cpus == 1 ? "" : "s"), ""});
}

void judge_memory(const HostFacts& host, Findings& out) {
  const std::string limit =
      host.memory_limit ? fmt::format(", the container's limit is {}", describe_bytes(*host.memory_limit)) : "";
  const std::string what =
      fmt::format("{} of {} can be taken{}", describe_bytes(host.memory_available), describe_bytes(host.memory_total), limit);
  if (host.memory_available < 256 * mebi) {
    out.push_back({Severity::failed, "memory", what, "free some: heaps and weights of even a small layer need more"});
  } else if (host.memory_available < 2 * gibi) {
    out.push_back({Severity::warning, "memory", what, "enough for small layers; a layer of a published size needs 2 GiB or more"});
  } else {
    out.push_back({Severity::ok, "memory", what, ""});
  }
}

void judge_shm(const MachineFacts& facts, Findings& out) {
  const bool matters = facts.gpus.size() > 1;
  const std::string why = "Heddle's own heaps do not lie there, but NCCL and most engines use it";
  if (!facts.host.shm_bytes) {
    out.push_back({matters ? Severity::warning : Severity::note, "shm", "there is no /dev/shm", why + "; mount a tmpfs of 1 GiB"});
  } else if (*facts.host.shm_bytes < gibi) {
    out.push_back({matters ? Severity::warning : Severity::note, "shm",
                   fmt::format("/dev/shm has {}", describe_bytes(*facts.host.shm_bytes)),
                   why + "; give the container 1 GiB (docker run --shm-size=1g, or --ipc=host)"});
  } else {
    out.push_back({Severity::ok, "shm", fmt::format("/dev/shm has {}", describe_bytes(*facts.host.shm_bytes)), ""});
  }
}

/// A limit of this shell or container that a group may run into.
void judge_limits(const MachineFacts& facts, Findings& out) {
  const HostFacts& host = facts.host;
  const std::size_t before = out.size();
  if (host.open_files && *host.open_files < 64) {
    out.push_back({Severity::failed, "limits", fmt::format("a process may open {} files", *host.open_files),
                   "a group of processes hands descriptors around; raise it: ulimit -n 1024"});
  } else if (host.open_files && *host.open_files < 1024) {
    out.push_back({Severity::warning, "limits", fmt::format("a process may open {} files", *host.open_files),
                   "large groups of processes and sharded checkpoints need more: ulimit -n 1024"});
  }
  if (host.processes && *host.processes < 512) {
    out.push_back({Severity::warning, "limits", fmt::format("this user may have {} processes and threads", *host.processes),
                   "a rank is a thread or a process, and has workers: ulimit -u 4096"});
  }
  if (facts.gpus.size() > 1 && host.locked_bytes && *host.locked_bytes < gibi) {
    out.push_back({Severity::note, "limits", fmt::format("a process may lock {} of memory", describe_bytes(*host.locked_bytes)),
                   "Heddle locks none; NCCL over InfiniBand does: ulimit -l unlimited (docker run --ulimit memlock=-1)"});
  }
  if (out.size() == before) out.push_back({Severity::ok, "limits", "files, processes and locked memory suffice", ""});
}

}  // namespace

void judge_host(const MachineFacts& facts, Findings& out) {
  judge_cpus(facts.host, out);
  judge_memory(facts.host, out);
  judge_shm(facts, out);
  judge_limits(facts, out);
}

}  // namespace heddle::doctor
