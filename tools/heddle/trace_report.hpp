// What `heddle trace` says of a traced call: its table, and the same numbers for --json.
#pragma once

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
};

/// Throws InputError where what is asked for runs in kernels that take no time stamps in this build.
void check_stamps(const LayerArguments& arguments);
/// A call with time stamps, after some without.
TracedWay traced(const Inputs& inputs, const LayerOptions& options, int warm_calls);

/// Per role what it did and what it waited for, as shares of the time that its lanes were there.
void print_totals(const TracedWay& way);
nlohmann::ordered_json json_of(const Inputs& inputs, const TracedWay& way);

}  // namespace heddle::tool
