// Power, clocks and temperature of GPUs while something runs: a thread that samples, and what its samples say.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "bench_nvml.hpp"

namespace heddle::tool {

struct PowerSample {
  double seconds = 0;  ///< since sampling began
  GpuReading reading;
};
/// Of one GPU, in order of time.
using PowerSamples = std::vector<PowerSample>;

/// Samples from its making until stop(), in a thread of its own.
class PowerSampler {
 public:
  /// `read`: a reading a GPU, called by that thread alone; always at once and at the end, in between every `period`.
  PowerSampler(std::function<std::vector<GpuReading>()> read, std::chrono::duration<double> period);

  /// A list a GPU.
  std::vector<PowerSamples> stop();

 private:
  void sample();
  void run(const std::stop_token& stop, std::chrono::duration<double> period);

  std::function<std::vector<GpuReading>()> read_;
  std::chrono::steady_clock::time_point begin_;
  std::vector<PowerSamples> samples_;
  std::jthread thread_;
};

/// Power is an average of the second before: samples of the first second say what was before the loop.
constexpr double lagging_seconds = 1.0;
/// Those behind the first second; all where none are.
PowerSamples settled(const PowerSamples& samples);

struct Energy {
  double joules = 0;
  bool counted = false;  ///< by the GPU's counter; else the mean power of settled samples times the time
};
/// From the first to the last sample; nothing where they tell neither energy nor power.
std::optional<Energy> energy_of(const PowerSamples& samples);

/// Of one GPU: power_w, sm_clock_mhz, memory_clock_mhz and temperature_c, each with median, least and most of the settled samples;
/// `throttled`, by reason the share of them that named it; energy_j and energy_from; `samples`, all of them as lists. What is
/// not told is null.
nlohmann::ordered_json power_json(const PowerSamples& samples);

/// Sums over GPUs, from power_json of each: null unless all told it.
nlohmann::ordered_json sum_over_gpus(const nlohmann::ordered_json& gpus, const char* field, const char* inner = nullptr);

}  // namespace heddle::tool
