#include "doctor_json.hpp"

#include "heddle/version.hpp"

namespace heddle::tool {

namespace {

using namespace doctor;
using Json = nlohmann::ordered_json;

/// null where nothing is known.
template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json host_json(const HostFacts& host) {
  return {{"cpus", host.cpus},
          {"cpu_quota", or_null(host.cpu_quota)},
          {"memory_bytes", host.memory_total},
          {"available_bytes", host.memory_available},
          {"memory_limit_bytes", or_null(host.memory_limit)},
          {"shm_bytes", or_null(host.shm_bytes)},
          {"locked_bytes", or_null(host.locked_bytes)},
          {"open_files", or_null(host.open_files)},
          {"processes", or_null(host.processes)}};
}

Json driver_json(const DriverFacts& driver) {
  return {{"kernel_module", or_null(driver.kernel_module)},
          {"library", driver.library},
          {"error", driver.error},
          {"cuda", driver.cuda},
          {"version", or_null(driver.version)},
          {"management", driver.management},
          {"nccl", or_null(driver.nccl)}};
}

Json gpu_json(const GpuFacts& gpu) {
  return {{"index", gpu.index},
          {"name", gpu.name},
          {"bus_id", gpu.bus_id},
          {"compute_capability", std::to_string(gpu.major) + "." + std::to_string(gpu.minor)},
          {"sms", gpu.sms},
          {"memory_bytes", gpu.memory_bytes},
          {"free_bytes", or_null(gpu.free_bytes)},
          {"shared_bytes", gpu.shared_bytes},
          {"shared_optin_bytes", gpu.shared_optin_bytes},
          {"virtual_memory", gpu.virtual_memory},
          {"descriptors", gpu.descriptors},
          {"cooperative", gpu.cooperative},
          {"sm_clock_mhz", or_null(gpu.sm_clock_mhz)},
          {"most_sm_clock_mhz", or_null(gpu.most_sm_clock_mhz)},
          {"memory_clock_mhz", or_null(gpu.memory_clock_mhz)},
          {"power_limit_w", or_null(gpu.power_limit_w)},
          {"usual_power_limit_w", or_null(gpu.usual_power_limit_w)},
          {"slow_reasons", or_null(gpu.slow_reasons)},
          {"compute_mode", or_null(gpu.compute_mode)},
          {"divided", or_null(gpu.divided)},
          {"memory_errors", or_null(gpu.memory_errors)},
          {"links", or_null(gpu.links)},
          {"links_up", or_null(gpu.links_up)}};
}

const char* word_of(TestFacts::State state) {
  switch (state) {
    case TestFacts::State::passed:
      return "passed";
    case TestFacts::State::failed:
      return "failed";
    case TestFacts::State::skipped:
      break;
  }
  return "skipped";
}

Json facts_json(const MachineFacts& facts) {
  const EnvironmentFacts& environment = facts.environment;
  Json json{{"host", host_json(facts.host)},
            {"environment",
             {{"visible_devices", or_null(environment.visible_devices)},
              {"mps_thread_percentage", or_null(environment.mps_thread_percentage)},
              {"launch_blocking", environment.launch_blocking},
              {"mps", environment.mps}}},
            {"build", {{"cuda", facts.build.cuda}, {"runtime", facts.build.runtime}}},
            {"driver", driver_json(facts.driver)},
            {"gpus", Json::array()},
            {"pairs", Json::array()},
            {"tests", Json::array()}};
  for (const GpuFacts& gpu : facts.gpus) json["gpus"].push_back(gpu_json(gpu));
  for (const PairFacts& pair : facts.pairs)
    json["pairs"].push_back({{"from", pair.from}, {"to", pair.to}, {"access", pair.access}, {"atomics", pair.atomics}});
  for (const TestFacts& test : facts.tests) {
    json["tests"].push_back(
        {{"name", test.name}, {"state", word_of(test.state)}, {"seconds", test.seconds}, {"message", test.message}});
  }
  return json;
}

}  // namespace

Json doctor_json(const MachineFacts& facts, const std::vector<Finding>& findings) {
  Json json{{"heddle", version}, {"fit", is_fit(findings)}, {"findings", Json::array()}};
  for (const Finding& finding : findings) {
    json["findings"].push_back({{"severity", name(finding.severity)},
                                {"subject", finding.subject},
                                {"what", finding.what},
                                {"advice", finding.advice.empty() ? Json(nullptr) : Json(finding.advice)}});
  }
  json["facts"] = facts_json(facts);
  return json;
}

}  // namespace heddle::tool
