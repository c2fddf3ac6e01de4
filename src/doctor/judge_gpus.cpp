// Judgement of each GPU and of the links between them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "doctor/judges.hpp"
#include "doctor/nvml.hpp"
#include "experts/sm90/tile.hpp"
#include "group/memory.hpp"

namespace heddle::doctor {

namespace {

/// What keeps Heddle's kernels from running at all.
void judge_kind(const GpuFacts& gpu, const std::string& subject, Findings& out) {
  const auto fail = [&](std::string what, std::string advice) {
    out.push_back({Severity::failed, subject, std::move(what), std::move(advice)});
  };
  if (gpu.major != 9 || gpu.minor != 0) {
    fail(fmt::format("{} has compute capability {}.{}", gpu.name, gpu.major, gpu.minor),
         "kernels are built for 9.0 (sm_90a: H100, H200, GH200); leave this GPU out with CUDA_VISIBLE_DEVICES");
    return;  // what else it lacks follows from that
  }
  if (gpu.shared_optin_bytes < sm90::most_shared_bytes) {
    fail(fmt::format("a block may have {} bytes of shared memory ({} without asking), kernels ask for up to {}",
                     gpu.shared_optin_bytes, gpu.shared_bytes, sm90::most_shared_bytes),
         "a tool or a virtual GPU takes some of it; use the whole GPU");
  }
  if (!gpu.virtual_memory || !gpu.descriptors) {
    fail(fmt::format("no {}", gpu.virtual_memory ? "export of memory as file descriptors" : "virtual memory management"),
         "the symmetric heap needs both; a virtual GPU may lack them, use the whole one");
  }
  if (!gpu.cooperative) fail("no cooperative launches", "virtual ranks need them; use the whole GPU");
}

/// How it is set up: who may use it, and how much of it.
void judge_setting(const GpuFacts& gpu, const std::string& subject, Findings& out) {
  constexpr std::uint64_t gibi = std::uint64_t{1} << 30;
  const auto warn = [&](std::string what, std::string advice) {
    out.push_back({Severity::warning, subject, std::move(what), std::move(advice)});
  };
  if (gpu.compute_mode == 2) {
    out.push_back(
        {Severity::failed, subject, "its compute mode forbids programs", fmt::format("nvidia-smi -i {} -c DEFAULT", gpu.index)});
  } else if (gpu.compute_mode == 1 || gpu.compute_mode == 3) {
    warn("its compute mode allows one process at a time",
         fmt::format("several ranks as processes cannot share it: nvidia-smi -i {} -c DEFAULT", gpu.index));
  }
  if (gpu.divided.value_or(false))
    warn("it is divided (MIG)", "a part reaches no other GPU and has fewer SMs; measure on whole GPUs");
  if (gpu.free_bytes && *gpu.free_bytes < 4 * gibi) {
    warn(fmt::format("{} of {} are free", describe_bytes(*gpu.free_bytes), describe_bytes(gpu.memory_bytes)),
         "other processes hold the rest (nvidia-smi); end them, or layers of published sizes will not fit");
  }
  if (gpu.memory_errors.value_or(0) > 0) {
    warn(fmt::format("{} uncorrected memory errors since the driver was loaded", *gpu.memory_errors),
         "results may be wrong; have it reset, or replaced where they come back");
  }
}

/// What makes it slower than others of its kind.
void judge_speed(const GpuFacts& gpu, const std::string& subject, Findings& out) {
  if (gpu.power_limit_w && gpu.usual_power_limit_w && *gpu.power_limit_w < *gpu.usual_power_limit_w) {
    out.push_back({Severity::warning, subject,
                   fmt::format("its power is capped at {:.0f} W, {:.0f} W are usual", *gpu.power_limit_w, *gpu.usual_power_limit_w),
                   fmt::format("large products run slower; an administrator raises it: nvidia-smi -i {} -pl {:.0f}", gpu.index,
                               *gpu.usual_power_limit_w)});
  }
  const std::uint64_t reasons = gpu.slow_reasons.value_or(0);
  if ((reasons & (hardware | thermal | hardware_thermal | power_brake)) != 0) {
    const bool hot = (reasons & (thermal | hardware_thermal)) != 0;
    out.push_back(
        {Severity::warning, subject,
         fmt::format("its clocks are held down by {} ({} MHz of {})", hot ? "heat" : "the hardware (power brake or slowdown)",
                     gpu.sm_clock_mhz.value_or(0), gpu.most_sm_clock_mhz.value_or(0)),
         "times are not this GPU's; look at cooling and power supply (nvidia-smi -q -d PERFORMANCE)"});
  } else if ((reasons & power_cap) != 0) {
    out.push_back({Severity::note, subject, fmt::format("its clocks are at the power cap ({} MHz)", gpu.sm_clock_mhz.value_or(0)),
                   "something else computes on it; measure when it is idle"});
  }
  if ((reasons & set_clocks) != 0) {
    out.push_back(
        {Severity::note, subject,
         fmt::format("its clocks are set by hand ({} MHz of {})", gpu.sm_clock_mhz.value_or(0), gpu.most_sm_clock_mhz.value_or(0)),
         "good for comparing, lower than usual for absolute times; nvidia-smi -rac takes it back"});
  }
  if (gpu.links && gpu.links_up && *gpu.links_up > 0 && *gpu.links_up < *gpu.links) {
    out.push_back({Severity::warning, subject, fmt::format("{} of {} NVLinks are up", *gpu.links_up, *gpu.links),
                   "rows travel slower than they should; look at nvidia-smi nvlink --status"});
  }
}

std::string describe(const GpuFacts& gpu) {
  std::string text = fmt::format("{}, {} SMs, {}, {} KiB of shared memory a block ({} without asking)", gpu.name, gpu.sms,
                                 describe_bytes(gpu.memory_bytes), gpu.shared_optin_bytes / 1024, gpu.shared_bytes / 1024);
  if (gpu.most_sm_clock_mhz) text += fmt::format(", SMs up to {} MHz", *gpu.most_sm_clock_mhz);
  if (gpu.memory_clock_mhz) text += fmt::format(", memory at {} MHz", *gpu.memory_clock_mhz);
  if (gpu.power_limit_w) text += fmt::format(", {:.0f} W", *gpu.power_limit_w);
  return text;
}

}  // namespace

void judge_gpu(const GpuFacts& gpu, Findings& out) {
  const std::string subject = fmt::format("gpu {}", gpu.index);
  const std::size_t before = out.size();
  judge_kind(gpu, subject, out);
  if (out.size() == before) out.push_back({Severity::ok, subject, describe(gpu), ""});
  judge_setting(gpu, subject, out);
  judge_speed(gpu, subject, out);
}

void judge_links(const MachineFacts& facts, Findings& out) {
  if (facts.gpus.size() < 2) return;
  std::vector<std::string> apart, without_atomics;
  for (const PairFacts& pair : facts.pairs) {
    if (!pair.access) {
      apart.push_back(fmt::format("{} to {}", pair.from, pair.to));
    } else if (!pair.atomics) {
      without_atomics.push_back(fmt::format("{} to {}", pair.from, pair.to));
    }
  }
  if (!apart.empty()) {
    out.push_back({Severity::failed, "links", fmt::format("GPUs cannot reach each other's memory: {}", fmt::join(apart, ", ")),
                   "a group needs linked GPUs (nvidia-smi topo -p2p r); name linked ones with CUDA_VISIBLE_DEVICES"});
  }
  if (!without_atomics.empty()) {
    out.push_back({Severity::failed, "links", fmt::format("links without native atomics: {}", fmt::join(without_atomics, ", ")),
                   "words need NVLink; name GPUs that have it with CUDA_VISIBLE_DEVICES (nvidia-smi topo -m)"});
  }
  if (apart.empty() && without_atomics.empty()) {
    out.push_back(
        {Severity::ok, "links", fmt::format("all {} GPUs reach each other's memory, with native atomics", facts.gpus.size()), ""});
  }
}

}  // namespace heddle::doctor
