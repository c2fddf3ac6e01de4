// What every benchmark tells: where and when it ran, what its samples say, a line of a table at once.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_replay.hpp"

namespace heddle::tool {

/// Name, number of GPUs and SMs, versions, and clocks and limits as the driver's management library tells them, if it is there.
nlohmann::ordered_json machine_of(const Lanes& lanes);
std::string now_in_utc();
/// This process's command line, as typed.
std::string command_line();

/// median_us, least_us, most_us and samples_us of samples in microseconds.
nlohmann::ordered_json summary(const std::vector<double>& samples);
void print_line(const std::string& line);

}  // namespace heddle::tool
