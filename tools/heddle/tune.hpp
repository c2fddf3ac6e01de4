// heddle tune: measured times of the ways at a list of sizes, as the table that way auto chooses by.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "heddle/tuning.hpp"
#include "inputs.hpp"

namespace heddle::tool {

struct TuneArguments {
  LayerArguments layer;
  std::vector<int> sizes;          ///< tokens a rank
  std::vector<std::string> ways;   ///< empty: all that do what the options ask
  std::vector<std::string> bench;  ///< JSON of `heddle bench mega` to take times from, instead of measuring
  std::string out;
  int calls = 9;
};

/// Host engine: the median over calls of the slowest rank's time, ranks as threads. A line is printed for every size.
TuningEntry tune_on_host(const TuneArguments& arguments);

/// GPUs: what `heddle bench mega` measures, calls replayed as CUDA graphs. Throws InputError in a build without CUDA.
std::vector<TuningEntry> tune_on_gpus(const TuneArguments& arguments);

/// The layers without a shared expert that a run of `heddle bench mega` measured; `whose` is what errors call it.
std::vector<TuningEntry> entries_of_bench(const nlohmann::ordered_json& bench, const std::string& whose);

}  // namespace heddle::tool
