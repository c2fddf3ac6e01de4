// What heddle replay was asked for, and what it found.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "inputs.hpp"
#include "replay/replay.hpp"

namespace heddle::tool {

/// What was typed; what was not is empty.
struct ReplayArguments {
  std::string recording, recorded_weights, preset, weights, wire, combine_wire = "bf16", machine = "h200", engine = "host", json;
  std::optional<int> ranks, gpus, tokens, steps, hidden, intermediate, experts, topk;
  std::vector<int> layers;
  std::vector<std::string> ways;
  std::string copies = "levelled";
  std::optional<int> groups;
  int expand = 1, replicas = 0, nodes = 1, calls = 3;
  std::uint64_t seed = 0;
  bool measure = false;
};

/// Measured times of one way, in seconds: medians over the calls of every step, of the slowest rank.
struct MeasuredWay {
  std::map<int, double> layers;  ///< mean over steps, by layer of the recording
  double step = 0;               ///< sum over layers
  double max_over_mean = 0;      ///< of the pairs that ranks computed in a step, mean over steps and layers
};
/// One placement's.
struct MeasuredPlacement {
  int replicas = 0;  ///< 0: contiguous
  std::map<Way, MeasuredWay> ways;
};
using Measured = std::vector<MeasuredPlacement>;

/// Everything that is said of a replay.
struct ReplayReport {
  const ReplayArguments& arguments;
  const replay::Source& source;
  const replay::ReplayOptions& options;
  const replay::ReplayResult& result;
  const Measured& measured;        ///< empty without --measure
  std::string kind;                ///< "prompt tokens", "decode steps", "counts of experts"
  std::vector<std::string> notes;  ///< what a reader should know
};

/// Runs every replayed layer and step by every way, one after the other, on the engine that was asked for: under the contiguous
/// placement, and under that with replicas where there are any. Weights are drawn, and hidden states too where the recording has
/// none.
Measured measure_replay(const ReplayArguments& arguments, const Recording& recording, const replay::Cut& cut,
                        const replay::Source& source, const replay::ReplayOptions& options, const replay::ReplayResult& result);

void print_replay(const ReplayReport& report);
nlohmann::ordered_json replay_json(const ReplayReport& report);

}  // namespace heddle::tool
