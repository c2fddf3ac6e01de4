// Probes: what fills the facts. None throws, needs a library to link or changes anything; what is not there stays empty.
#pragma once

#include "doctor/facts.hpp"

namespace heddle::doctor {

/// Processor, memory, the container's limits (cgroup 2, else 1), ulimits.
HostFacts probe_host();
EnvironmentFacts probe_environment();

/// The driver, NVML and NCCL, each opened at run time, and what they say of GPUs and pairs. Uses the driver in this process, so
/// that it cannot fork ranks with GPUs afterwards.
void probe_gpus(MachineFacts& facts);

}  // namespace heddle::doctor
