// The loops of `heddle bench mega --power`: graphs replayed for seconds, with what GPUs say of themselves meanwhile.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_nvml.hpp"
#include "bench_replay.hpp"

namespace heddle::tool {

/// What is replayed.
struct PowerLoad {
  int calls = 1;         ///< of the layer, a replay
  long long tokens = 1;  ///< of all ranks, a call
  double short_us = 0;   ///< a call, as measured without a loop
};

class PowerLoops {
 public:
  /// Of `seconds` at least.
  PowerLoops(const Lanes& lanes, double seconds);

  /// Why power is not known; empty: it is.
  const std::string& missing() const { return nvml_.missing(); }
  /// One loop, sampled at 10 Hz: the entry `sustained` of a line (docs/json.md). `check` and `give_up` as of Replay::run.
  nlohmann::ordered_json run(Replay& replay, const PowerLoad& load, const std::function<void()>& check,
                             const std::function<void()>& give_up) const;

 private:
  std::vector<GpuReading> read() const;

  Nvml nvml_;
  std::vector<void*> gpus_;  ///< NVML's handles
  double seconds_;
};

/// A line of a table that says so.
std::string power_line(const nlohmann::ordered_json& sustained);

}  // namespace heddle::tool
