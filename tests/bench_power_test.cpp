// What `heddle bench mega --power` makes of NVML's answers and of samples, on made-up ones.
#include "bench_power.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace heddle::tool {
namespace {

using Json = nlohmann::ordered_json;

PowerSample sample(double seconds, double power_w, double sm_clock_mhz, std::uint64_t throttle) {
  PowerSample one{seconds, {}};
  one.reading.power_w = power_w;
  one.reading.sm_clock_mhz = sm_clock_mhz;
  one.reading.throttle = throttle;
  return one;
}

TEST(Nvml, SaysWhyItIsNotThere) {
  const Nvml nvml("libheddle-nvml-nowhere.so.1");
  EXPECT_NE(nvml.missing().find("libheddle-nvml-nowhere.so.1 was not found"), std::string::npos) << nvml.missing();
  EXPECT_EQ(nvml.device("0000:1B:00.0"), nullptr);
  EXPECT_EQ(nvml.driver(), std::nullopt);
  EXPECT_EQ(reading_of(nvml, nullptr).power_w, std::nullopt);
}

TEST(Nvml, IsReadInItsUnits) {
  const Nvml nvml(HEDDLE_NVML_STAND_IN);
  ASSERT_EQ(nvml.missing(), "");
  EXPECT_EQ(nvml.driver(), "580.1");
  EXPECT_EQ(nvml.device("0000:FF:00.0"), nullptr);
  void* gpu = nvml.device("0000:1B:00.0");
  ASSERT_NE(gpu, nullptr);
  const GpuReading reading = reading_of(nvml, gpu);
  EXPECT_DOUBLE_EQ(reading.power_w.value(), 612.5);
  EXPECT_DOUBLE_EQ(reading.energy_j.value(), 5060.0);
  EXPECT_DOUBLE_EQ(reading.sm_clock_mhz.value(), 1980);
  EXPECT_DOUBLE_EQ(reading.memory_clock_mhz.value(), 3201);
  EXPECT_EQ(reading.temperature_c, std::nullopt) << "it does not tell";
  EXPECT_EQ(reading.throttle, 0x4u) << "under its newer name";
  EXPECT_DOUBLE_EQ(nvml.power_limit_w(gpu).value(), 700);
}

TEST(Power, TheFirstSecondIsLeftOut) {
  const PowerSamples samples{sample(0, 100, 300, 1), sample(0.9, 200, 900, 1), sample(1.0, 500, 1700, 4), sample(2.0, 700, 1500, 4),
                             sample(3.0, 600, 1600, 0x24)};
  const Json json = power_json(samples);
  EXPECT_EQ(json["power_w"], (Json{{"median", 600.0}, {"least", 500.0}, {"most", 700.0}}));
  EXPECT_EQ(json["sm_clock_mhz"], (Json{{"median", 1600.0}, {"least", 1500.0}, {"most", 1700.0}}));
  EXPECT_TRUE(json["memory_clock_mhz"].is_null());
  EXPECT_EQ(json["throttled"], (Json{{"power_cap", 1.0}, {"thermal_slowdown", 1.0 / 3}}));
  EXPECT_EQ(json["samples"]["seconds"].size(), 5u) << "all of them";
  EXPECT_EQ(json["samples"]["throttle"][4], 0x24);
  EXPECT_TRUE(json["samples"]["temperature_c"][0].is_null());
}

TEST(Power, AShortLoopHasAllItsSamples) {
  const PowerSamples samples{sample(0, 100, 300, 1), sample(0.5, 200, 900, 0)};
  EXPECT_EQ(settled(samples).size(), 2u);
  EXPECT_EQ(power_json(samples)["power_w"]["most"], 200.0);
}

TEST(Power, EnergyIsTheCountersOrPowerTimesTime) {
  PowerSamples samples{sample(0, 100, 300, 0), sample(1.5, 500, 300, 0), sample(5, 700, 300, 0)};
  ASSERT_TRUE(energy_of(samples).has_value());
  EXPECT_DOUBLE_EQ(energy_of(samples)->joules, 600.0 * 5) << "the mean of settled samples over the whole time";
  EXPECT_FALSE(energy_of(samples)->counted);
  samples.front().reading.energy_j = 1000;
  samples.back().reading.energy_j = 4100;
  EXPECT_DOUBLE_EQ(energy_of(samples)->joules, 3100);
  EXPECT_TRUE(energy_of(samples)->counted);
  EXPECT_EQ(power_json(samples)["energy_from"], "counter");
  samples.back().reading.energy_j = 1000;
  EXPECT_FALSE(energy_of(samples)->counted) << "a counter that stands still counts nothing";
}

TEST(Power, NothingToldIsNull) {
  const Json json = power_json({{0, {}}, {1, {}}});
  for (const char* field : {"power_w", "sm_clock_mhz", "temperature_c", "throttled", "energy_j", "energy_from"})
    EXPECT_TRUE(json[field].is_null()) << field;
  EXPECT_FALSE(energy_of({}).has_value());
  EXPECT_FALSE(energy_of({sample(0, 100, 300, 0)}).has_value()) << "one sample spans no time";
}

TEST(Power, SumsNeedAllGpus) {
  Json gpus = Json::array();
  EXPECT_TRUE(sum_over_gpus(gpus, "energy_j").is_null());
  gpus.push_back({{"energy_j", 10.0}, {"power_w", {{"median", 300.0}}}});
  gpus.push_back({{"energy_j", 12.5}, {"power_w", {{"median", 310.0}}}});
  EXPECT_EQ(sum_over_gpus(gpus, "energy_j"), 22.5);
  EXPECT_EQ(sum_over_gpus(gpus, "power_w", "median"), 610.0);
  gpus[1]["power_w"] = nullptr;
  EXPECT_TRUE(sum_over_gpus(gpus, "power_w", "median").is_null());
}

TEST(PowerSampler, SamplesAtOnceAtTheEndAndInBetween) {
  int readings = 0;
  PowerSampler sampler(
      [&] {
        GpuReading one, other;
        one.power_w = ++readings;
        other.power_w = 100 + readings;
        return std::vector<GpuReading>{one, other};
      },
      std::chrono::duration<double>(0.001));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::vector<PowerSamples> samples = sampler.stop();
  ASSERT_EQ(samples.size(), 2u) << "a list a GPU";
  ASSERT_GE(samples[0].size(), 2u);
  ASSERT_EQ(samples[0].size(), static_cast<std::size_t>(readings));
  for (std::size_t i = 0; i < samples[0].size(); ++i) {
    EXPECT_EQ(samples[0][i].reading.power_w, static_cast<double>(i + 1));
    EXPECT_EQ(samples[1][i].reading.power_w, static_cast<double>(i + 101));
    EXPECT_GE(samples[0][i].seconds, i == 0 ? 0.0 : samples[0][i - 1].seconds);
  }
}

// A loop that throws leaves without asking for samples.
TEST(PowerSampler, EndsWithItsOwner) {
  EXPECT_THROW(
      {
        PowerSampler sampler([] { return std::vector<GpuReading>(1); }, std::chrono::duration<double>(3600));
        throw std::runtime_error("a GPU failed");
      },
      std::runtime_error);
}

}  // namespace
}  // namespace heddle::tool
