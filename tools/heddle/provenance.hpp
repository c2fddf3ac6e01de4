// What every measurement tells: when and by which command it was made, on which host, of which layer, and what its samples say.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "heddle/experts.hpp"
#include "heddle/shape.hpp"

namespace heddle::tool {

std::string now_in_utc();
/// This process's command line, as typed.
std::string command_line();
/// `processor`, `cores` (that this process may use) and `engine`: host.
nlohmann::ordered_json host_machine_json();

/// What every result begins with: `heddle` (its version), `benchmark`, `date`, `commit`, `command` and `machine`.
nlohmann::ordered_json result_head(const std::string& benchmark, const std::string& commit, const nlohmann::ordered_json& machine);
/// `hidden`, `intermediate`, `experts`, `topk` and `weights`.
nlohmann::ordered_json layer_json(const LayerShape& shape, WeightKind kind);

/// The middle of some numbers; 0 of none.
double median(std::vector<double> values);
/// median_us, least_us, most_us (null of none) and samples_us of samples in microseconds.
nlohmann::ordered_json summary(const std::vector<double>& samples);
/// "1 layer", "8 layers".
std::string count_of(std::int64_t n, const char* what);
/// A line of a table, at once.
void print_line(const std::string& line);

}  // namespace heddle::tool
