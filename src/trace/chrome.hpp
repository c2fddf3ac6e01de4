// A trace as the Trace Event Format has it, which Perfetto (ui.perfetto.dev) and chrome://tracing load.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "trace/segments.hpp"

namespace heddle::trace {

/// One JSON object, an event a line. A process a rank (of the second call behind those of the first), a thread a lane; every span
/// is a complete event ("X", microseconds) whose args tell the task, the word and the summed waits (microseconds). `other`: what
/// goes into "otherData".
std::string chrome_trace(std::span<const TracedCall> calls, int ctas, const nlohmann::ordered_json& other);

}  // namespace heddle::trace
