// What `heddle trace` says of a traced call: its table, and the same numbers for --json.
#pragma once

#include <map>
#include <nlohmann/json.hpp>

#include "inputs.hpp"
#include "job.hpp"
#include "trace/segments.hpp"
#include "trace/totals.hpp"

namespace heddle::tool {

/// One way's call.
struct TracedWay {
  LayerOptions options;
  JobResult result;
  trace::TracedCall call;
  trace::Totals totals;
  std::map<int, std::int64_t> clocks;  ///< by GPU, the uncertainty of its lanes' times in nanoseconds
};

/// Throws InputError where what is asked for runs in kernels that take no time stamps in this build.
void check_stamps(const LayerArguments& arguments);
/// A call with time stamps, after some without.
TracedWay traced(const Inputs& inputs, const LayerOptions& options, int warm_calls);

/// Per role what it did and what it waited for, as shares of the time that its lanes were there.
void print_totals(const TracedWay& way);
/// How well the lanes of GPUs agree, by JSON: `gpus` and `uncertainty_seconds`; null without GPUs.
nlohmann::ordered_json json_of_clocks(const TracedWay& way);
nlohmann::ordered_json json_of(const Inputs& inputs, const TracedWay& way);

}  // namespace heddle::tool
