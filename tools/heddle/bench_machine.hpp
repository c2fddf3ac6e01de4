// Where and when a benchmark ran.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench_replay.hpp"

namespace heddle::tool {

/// Name, number of GPUs and SMs, versions, and clocks and limits as the driver's management library tells them, if it is there.
nlohmann::ordered_json machine_of(const Lanes& lanes);
std::string now_in_utc();
/// This process's command line, as typed.
std::string command_line();

}  // namespace heddle::tool
