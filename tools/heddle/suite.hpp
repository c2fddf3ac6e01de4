// heddle bench all: every measurement that the report and the articles ask for and this machine can make, into one file.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace heddle::tool {

struct SuiteArguments {
  std::string engine = "host";
  std::optional<int> gpus;  ///< default: all
  std::vector<std::string> only;
  std::optional<int> budget;  ///< seconds; default: none
  std::string recordings = "tests/data/routing";
  std::string out, commit;
  bool list = false;
};

/// One thing to measure, which one call does as a whole.
struct Measurement {
  std::string name;
  std::string benchmark;  ///< who measures: a key of the runners
  std::string arguments;  ///< as they would be typed behind it
  std::string serves;     ///< which figures and placeholders of the articles
  double seconds = 0;     ///< that it takes, about
};

/// In the order of how much the report would miss them. `gpus`: of the machine, 0 with the host engine.
std::vector<Measurement> host_list(const SuiteArguments& a);
std::vector<Measurement> gpu_list(const SuiteArguments& a, int gpus);

/// What a measurement found: its JSON, and why it ended early, if it did.
struct Measured {
  nlohmann::ordered_json result;
  std::string failed;
  bool wrong = false;  ///< some outputs were wrong: the result says which
};
using Runner = std::function<Measured(const std::string& arguments, const std::string& commit)>;
/// By benchmark. Throw InputError where a machine or build cannot measure what is asked, Error where something went wrong before
/// anything was measured.
std::map<std::string, Runner> host_runners();
std::map<std::string, Runner> gpu_runners();
/// What the planner and recordings say, and what needs no layer.
Measured measure_copies(const std::string& arguments, const std::string& commit);
Measured measure_buffers(const std::string& arguments, const std::string& commit);
Measured measure_host_machine(const std::string& arguments, const std::string& commit);
Measured measure_host_grids(const std::string& arguments, const std::string& commit);
Measured measure_host_trips(const std::string& arguments, const std::string& commit);
Measured measure_host_layer(const std::string& arguments, const std::string& commit);
Measured measure_trace(const std::string& arguments, const std::string& commit);

/// The machine as results name it, and how many GPUs are there to be used. Throws InputError without CUDA or GPUs, or for more
/// than there are.
struct SuiteMachine {
  nlohmann::ordered_json json;
  int gpus = 0;
};
SuiteMachine gpu_machine(const std::optional<int>& gpus);

}  // namespace heddle::tool
