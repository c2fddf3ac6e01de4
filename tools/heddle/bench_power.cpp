#include "bench_power.hpp"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <utility>

namespace heddle::tool {

namespace {

using Json = nlohmann::ordered_json;
using Field = std::optional<double> GpuReading::*;

/// Idle is none of them while something runs, and said all the same.
constexpr std::pair<doctor::SlowReason, const char*> reasons[] = {{doctor::idle, "idle"},
                                                                  {doctor::set_clocks, "application_clocks"},
                                                                  {doctor::power_cap, "power_cap"},
                                                                  {doctor::hardware, "hardware_slowdown"},
                                                                  {doctor::sync_boost, "sync_boost"},
                                                                  {doctor::thermal, "thermal_slowdown"},
                                                                  {doctor::hardware_thermal, "hardware_thermal"},
                                                                  {doctor::power_brake, "power_brake"},
                                                                  {doctor::display_clock, "display_clock"}};

Json optional_number(const std::optional<double>& value) { return value ? Json(*value) : Json(); }

std::vector<double> told(const PowerSamples& samples, Field field) {
  std::vector<double> values;
  for (const PowerSample& sample : samples) {
    if (sample.reading.*field) values.push_back(*(sample.reading.*field));
  }
  return values;
}

Json spread(const PowerSamples& samples, Field field) {
  std::vector<double> values = told(samples, field);
  if (values.empty()) return Json();
  std::sort(values.begin(), values.end());
  return {{"median", values[values.size() / 2]}, {"least", values.front()}, {"most", values.back()}};
}

Json throttled(const PowerSamples& samples) {
  std::vector<std::uint64_t> all;
  for (const PowerSample& sample : samples) {
    if (sample.reading.throttle) all.push_back(*sample.reading.throttle);
  }
  if (all.empty()) return Json();
  Json shares = Json::object();
  for (const auto& [bit, word] : reasons) {
    const auto having = std::count_if(all.begin(), all.end(), [bit = bit](std::uint64_t bits) { return (bits & bit) != 0; });
    if (having > 0) shares[word] = static_cast<double>(having) / static_cast<double>(all.size());
  }
  return shares;
}

Json raw(const PowerSamples& samples) {
  Json lists{{"seconds", Json::array()},          {"power_w", Json::array()},       {"sm_clock_mhz", Json::array()},
             {"memory_clock_mhz", Json::array()}, {"temperature_c", Json::array()}, {"throttle", Json::array()}};
  for (const auto& [seconds, reading] : samples) {
    lists["seconds"].push_back(seconds);
    lists["power_w"].push_back(optional_number(reading.power_w));
    lists["sm_clock_mhz"].push_back(optional_number(reading.sm_clock_mhz));
    lists["memory_clock_mhz"].push_back(optional_number(reading.memory_clock_mhz));
    lists["temperature_c"].push_back(optional_number(reading.temperature_c));
    lists["throttle"].push_back(reading.throttle ? Json(*reading.throttle) : Json());
  }
  return lists;
}

}  // namespace

PowerSampler::PowerSampler(std::function<std::vector<GpuReading>()> read, std::chrono::duration<double> period)
    : read_(std::move(read)),
      begin_(std::chrono::steady_clock::now()),
      thread_([this, period](const std::stop_token& stop) { run(stop, period); }) {}

void PowerSampler::sample() {
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - begin_;
  const std::vector<GpuReading> readings = read_();
  samples_.resize(std::max(samples_.size(), readings.size()));
  for (std::size_t gpu = 0; gpu < readings.size(); ++gpu) samples_[gpu].push_back({since.count(), readings[gpu]});
}

void PowerSampler::run(const std::stop_token& stop, std::chrono::duration<double> period) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  auto next = begin_;
  do {
    sample();
    next += std::chrono::duration_cast<std::chrono::steady_clock::duration>(period);
    stopped.wait_until(lock, stop, next, [] { return false; });  // until then, or until asked to stop
  } while (!stop.stop_requested());
  sample();
}

std::vector<PowerSamples> PowerSampler::stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
  return std::move(samples_);
}

PowerSamples settled(const PowerSamples& samples) {
  PowerSamples later;
  std::copy_if(samples.begin(), samples.end(), std::back_inserter(later),
               [](const PowerSample& sample) { return sample.seconds >= lagging_seconds; });
  return later.empty() ? samples : later;
}

std::optional<Energy> energy_of(const PowerSamples& samples) {
  if (samples.size() < 2) return std::nullopt;
  const PowerSample& first = samples.front();
  const PowerSample& last = samples.back();
  if (first.reading.energy_j && last.reading.energy_j && *last.reading.energy_j > *first.reading.energy_j)
    return Energy{*last.reading.energy_j - *first.reading.energy_j, true};
  const std::vector<double> powers = told(settled(samples), &GpuReading::power_w);
  if (powers.empty()) return std::nullopt;
  double sum = 0;
  for (const double power : powers) sum += power;
  return Energy{sum / static_cast<double>(powers.size()) * (last.seconds - first.seconds), false};
}

Json power_json(const PowerSamples& samples) {
  const PowerSamples later = settled(samples);
  const std::optional<Energy> energy = energy_of(samples);
  return {{"power_w", spread(later, &GpuReading::power_w)},
          {"sm_clock_mhz", spread(later, &GpuReading::sm_clock_mhz)},
          {"memory_clock_mhz", spread(later, &GpuReading::memory_clock_mhz)},
          {"temperature_c", spread(later, &GpuReading::temperature_c)},
          {"throttled", throttled(later)},
          {"energy_j", energy ? Json(energy->joules) : Json()},
          {"energy_from", energy ? Json(energy->counted ? "counter" : "power") : Json()},
          {"samples", raw(samples)}};
}

Json sum_over_gpus(const Json& gpus, const char* field, const char* inner) {
  double sum = 0;
  for (const Json& gpu : gpus) {
    const Json& value = inner == nullptr || gpu.at(field).is_null() ? gpu.at(field) : gpu.at(field).at(inner);
    if (value.is_null()) return Json();
    sum += value.get<double>();
  }
  return gpus.empty() ? Json() : Json(sum);
}

}  // namespace heddle::tool
