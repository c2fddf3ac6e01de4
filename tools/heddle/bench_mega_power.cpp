#include "bench_mega_power.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bench_machine.hpp"
#include "bench_power.hpp"
#include "group/cuda_driver.hpp"

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::chrono::duration<double> sampling_period(0.1);

/// Replays that are queued at once: some 50 ms, so that the host's looking in between costs less than a thousandth, and no more
/// than streams take without waiting.
int together(const PowerLoad& load) {
  constexpr double round_us = 5e4;
  constexpr double most = 64;
  return static_cast<int>(std::clamp(round_us / (load.short_us * load.calls), 1.0, most));
}

Json energy_json(const Json& gpus, const PowerLoad& load, long long calls) {
  const Json joules = sum_over_gpus(gpus, "energy_j");
  Json energy{{"energy_j", joules}, {"energy_per_call_j", Json()}, {"energy_per_token_j", Json()}};
  if (joules.is_null()) return energy;
  const double a_call = joules.get<double>() / static_cast<double>(calls);
  energy["energy_per_call_j"] = a_call;
  energy["energy_per_token_j"] = a_call / static_cast<double>(load.tokens);
  return energy;
}

std::string told(const Json& value, const char* format) {
  return value.is_null() ? "?" : fmt::format(fmt::runtime(format), value.get<double>());
}

/// Of the GPU whose SMs were slowest.
std::string clocks(const Json& gpus) {
  const Json* slowest = nullptr;
  for (const Json& gpu : gpus) {
    if (gpu["sm_clock_mhz"].is_null()) continue;
    if (slowest == nullptr || gpu["sm_clock_mhz"]["median"] < (*slowest)["sm_clock_mhz"]["median"]) slowest = &gpu;
  }
  if (slowest == nullptr) return "clocks unknown";
  std::string text = fmt::format("SMs at {} MHz (least {})", told((*slowest)["sm_clock_mhz"]["median"], "{:.0f}"),
                                 told((*slowest)["sm_clock_mhz"]["least"], "{:.0f}"));
  if ((*slowest)["throttled"].is_null()) return text;
  for (const auto& [reason, share] : (*slowest)["throttled"].items())
    text += fmt::format(", {} {:.0f}%", reason, 100 * share.get<double>());
  return text;
}

}  // namespace

PowerLoops::PowerLoops(const Lanes& lanes, double seconds) : seconds_(seconds) {
  for (const int device : lanes.devices()) {
    char bus_id[32] = {};
    cuda::check(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device), "bus of a GPU");
    gpus_.push_back(nvml_.device(bus_id));
  }
}

std::vector<GpuReading> PowerLoops::read() const {
  std::vector<GpuReading> readings;
  for (void* gpu : gpus_) readings.push_back(reading_of(nvml_, gpu));
  return readings;
}

Json PowerLoops::run(Replay& replay, const PowerLoad& load, const std::function<void()>& check,
                     const std::function<void()>& give_up) const {
  PowerSampler sampler([this] { return read(); }, sampling_period);
  Sustained loop = replay.sustain(seconds_, together(load), check, give_up);
  const std::vector<PowerSamples> samples = sampler.stop();
  for (double& sample : loop.samples) sample /= load.calls;
  const long long calls = loop.replays * load.calls;
  Json entry{{"seconds", loop.seconds}, {"calls", calls}};
  entry.update(summary(loop.samples));
  entry["over_short"] = median(loop.samples) / load.short_us;
  if (!missing().empty()) {
    entry["no_power"] = missing();
    return entry;
  }
  Json gpus = Json::array();
  for (const PowerSamples& gpu : samples) gpus.push_back(power_json(gpu));
  entry["power_w"] = {{"median", sum_over_gpus(gpus, "power_w", "median")}, {"most", sum_over_gpus(gpus, "power_w", "most")}};
  entry.update(energy_json(gpus, load, calls));
  entry["gpus"] = std::move(gpus);
  return entry;
}

std::string power_line(const Json& sustained) {
  std::string text = fmt::format("over {:.1f} s {:.2f} us a call, {:.3f} of the short run's", sustained["seconds"].get<double>(),
                                 sustained["median_us"].get<double>(), sustained["over_short"].get<double>());
  if (sustained.count("no_power") > 0) return text;
  const Json& a_call = sustained["energy_per_call_j"];
  const Json& a_token = sustained["energy_per_token_j"];
  return text + fmt::format("; {} W (most {}) on {} GPUs, {}; {} mJ a call, {} a token",
                            told(sustained["power_w"]["median"], "{:.0f}"), told(sustained["power_w"]["most"], "{:.0f}"),
                            sustained["gpus"].size(), clocks(sustained["gpus"]),
                            a_call.is_null() ? "?" : fmt::format("{:.2f}", 1e3 * a_call.get<double>()),
                            a_token.is_null() ? "?" : fmt::format("{:.4f}", 1e3 * a_token.get<double>()));
}

}  // namespace heddle::tool
