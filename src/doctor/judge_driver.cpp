// Judgement of the driver, how this command was built for it, and what the environment asks of both.
#include <fmt/format.h>

#include "doctor/judges.hpp"

namespace heddle::doctor {

namespace {

std::string cuda_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

const std::string host_engine = "the host engine is what is there, and every way runs on it (heddle verify, heddle run)";

/// What cuInit's errors mean to somebody who runs a container.
std::string advice_for(const DriverFacts& driver, const EnvironmentFacts& environment) {
  switch (driver.error) {
    case 100:
      return environment.visible_devices
                 ? fmt::format("CUDA_VISIBLE_DEVICES is '{}'; unset it, or name GPUs that are there", *environment.visible_devices)
                 : std::string("give the container its GPUs (docker run --gpus all)");
    case 802:
      return "the fabric manager does not run or is not done; start nvidia-fabricmanager of the driver's version on the host";
    case 803:
      return "libcuda is of another version than the kernel's driver; mount the host's, or restart after the driver's update";
    case 804:
      return "the forward-compatibility package does not serve this GPU; take it out of the library path, or update the driver";
    case 805:
    case 806:
    case 807:
    case 808:
    case 809:
    case 810:
      return "an MPS daemon refuses this process; end it (echo quit | nvidia-cuda-mps-control), or unset CUDA_MPS_PIPE_DIRECTORY";
    default:
      return "look at nvidia-smi and the kernel's log (dmesg) for what the driver says";
  }
}

/// No GPU can be used. Whether that is wrong follows from whether one should be there.
void judge_absence(const MachineFacts& facts, Findings& out) {
  constexpr int no_device = 100;
  const DriverFacts& driver = facts.driver;
  if (!driver.kernel_module && (!driver.library || driver.error == 0 || driver.error == no_device)) {
    out.push_back({Severity::note, "driver", "no NVIDIA driver, so no GPU; " + host_engine, ""});
  } else if (!driver.library) {
    out.push_back(
        {Severity::failed, "driver",
         fmt::format("the kernel has driver {}, but libcuda.so.1 was not found: GPUs are out of reach", *driver.kernel_module),
         "install the driver's user-space libraries, or start the container with them (docker run --gpus all)"});
  } else {
    out.push_back({Severity::failed, "driver",
                   fmt::format("driver {} shows no GPU (CUDA driver error {})", driver.kernel_module.value_or("(version not told)"),
                               driver.error),
                   advice_for(driver, facts.environment)});
  }
}

void judge_build(const MachineFacts& facts, Findings& out) {
  const DriverFacts& driver = facts.driver;
  if (!facts.build.cuda) {
    out.push_back({Severity::warning, "build", "this heddle was built without its CUDA part and leaves the GPUs alone",
                   "build it with the preset cuda (./dev build cuda; nvcc 13)"});
    return;
  }
  const std::string what = fmt::format("CUDA runtime {} in this build, the driver serves up to {}", cuda_text(facts.build.runtime),
                                       cuda_text(driver.cuda));
  if (driver.cuda < 12000 || driver.cuda / 1000 < facts.build.runtime / 1000) {
    out.push_back(
        {Severity::failed, "build", what, fmt::format("update the driver to one of CUDA {} or newer", facts.build.runtime / 1000)});
  } else if (driver.cuda < facts.build.runtime) {
    out.push_back({Severity::note, "build", what, "works within one major version; a newer driver has all of the runtime"});
  } else {
    out.push_back({Severity::ok, "build", what, ""});
  }
}

void judge_nccl(const MachineFacts& facts, Findings& out) {
  const std::optional<int>& nccl = facts.driver.nccl;
  if (!nccl) {
    out.push_back({Severity::note, "nccl", "libnccl.so.2 was not found: gather cannot go by NCCL, all else works",
                   "to compare with it install NCCL, or name its folder in LD_LIBRARY_PATH"});
    return;
  }
  const std::string what = fmt::format("NCCL {}.{}.{}", *nccl / 10000, *nccl / 100 % 100, *nccl % 100);
  if (*nccl < 21400) {
    out.push_back({Severity::warning, "nccl", what, "several processes need 2.14 or newer for gather by NCCL"});
  } else {
    out.push_back({Severity::ok, "nccl", what, ""});
  }
}

}  // namespace

void judge_driver(const MachineFacts& facts, Findings& out) {
  if (facts.gpus.empty()) return judge_absence(facts, out);
  const DriverFacts& driver = facts.driver;
  out.push_back({Severity::ok, "driver",
                 fmt::format("driver {}, {} GPU{}", driver.version.value_or(driver.kernel_module.value_or("(version not told)")),
                             facts.gpus.size(), facts.gpus.size() == 1 ? "" : "s"),
                 ""});
  if (!driver.management) {
    out.push_back(
        {Severity::note, "driver", "NVML (libnvidia-ml.so.1) was not found: clocks, power caps and links were not looked at", ""});
  }
  judge_build(facts, out);
}

void judge_environment(const MachineFacts& facts, Findings& out) {
  if (facts.gpus.empty()) return;
  judge_nccl(facts, out);
  const EnvironmentFacts& environment = facts.environment;
  if (environment.launch_blocking) {
    out.push_back({facts.gpus.size() > 1 ? Severity::failed : Severity::warning, "environment",
                   "CUDA_LAUNCH_BLOCKING is set: each launch waits for its kernel, and kernels of several GPUs wait for each other",
                   "unset it"});
  }
  if (environment.mps_thread_percentage) {
    out.push_back(
        {Severity::warning, "mps",
         fmt::format("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {}: kernels get a part of the SMs", *environment.mps_thread_percentage),
         "unset it: Heddle sizes its grids for the whole GPU (DeviceExchangeOptions::sms takes fewer)"});
  } else if (environment.mps) {
    out.push_back({Severity::note, "mps", "an MPS daemon runs: processes share a GPU's SMs",
                   "measure without it (echo quit | nvidia-cuda-mps-control)"});
  } else {
    out.push_back({Severity::ok, "mps", "no MPS daemon", ""});
  }
}

}  // namespace heddle::doctor
