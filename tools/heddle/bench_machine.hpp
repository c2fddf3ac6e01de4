// What every benchmark tells: where and when it ran, what its samples say, a line of a table at once.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_replay.hpp"

namespace heddle::tool {

/// The first `gpus` GPUs of this machine. gpus 0: all, at most one a rank; ranks 0: one a GPU; both are then what they mean. Throws
/// InputError, for lack of a GPU in the name of `heddle bench <benchmark>`.
std::vector<int> devices_for(const char* benchmark, int& ranks, int& gpus);

/// Name, number of GPUs and SMs, versions, and clocks and limits as the driver's management library tells them, if it is there.
nlohmann::ordered_json machine_of(const Lanes& lanes);
std::string now_in_utc();
/// This process's command line, as typed.
std::string command_line();

/// median_us, least_us, most_us and samples_us of samples in microseconds.
nlohmann::ordered_json summary(const std::vector<double>& samples);
void print_line(const std::string& line);

/// Where the lanes did not come to an end: saves with what was under way as the failure, says so, and ends the process. Memory
/// that a kernel still uses cannot be given back, so nothing less would end.
[[noreturn]] void end_of_patience(const std::string& under_way, const Lanes& lanes,
                                  const std::function<void(const std::string& failed)>& save);

}  // namespace heddle::tool
