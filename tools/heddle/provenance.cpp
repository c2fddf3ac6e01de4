#include "provenance.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>

#include "heddle/tuning.hpp"
#include "heddle/version.hpp"
#include "words.hpp"

namespace heddle::tool {

using Json = nlohmann::ordered_json;

std::string now_in_utc() {
  const std::time_t now = std::time(nullptr);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", std::gmtime(&now));
  return text;
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

Json host_machine_json() {
  cpu_set_t cores;
  const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  return {{"engine", "host"}, {"processor", host_machine()}, {"cores", known ? Json(CPU_COUNT(&cores)) : Json(nullptr)}};
}

Json result_head(const std::string& benchmark, const std::string& commit, const Json& machine) {
  return {{"heddle", version}, {"benchmark", benchmark},    {"date", now_in_utc()},
          {"commit", commit},  {"command", command_line()}, {"machine", machine}};
}

Json layer_json(const LayerShape& shape, WeightKind kind) {
  return {{"hidden", shape.hidden},
          {"intermediate", shape.intermediate},
          {"experts", shape.experts},
          {"topk", shape.topk},
          {"weights", word_of(kinds, kind)}};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Json summary(const std::vector<double>& samples) {
  if (samples.empty()) return {{"median_us", nullptr}, {"least_us", nullptr}, {"most_us", nullptr}, {"samples_us", samples}};
  return {{"median_us", median(samples)},
          {"least_us", *std::min_element(samples.begin(), samples.end())},
          {"most_us", *std::max_element(samples.begin(), samples.end())},
          {"samples_us", samples}};
}

std::string count_of(std::int64_t n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); }

void print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

}  // namespace heddle::tool
