// What a recording's file holds, whichever of the known formats it is in (docs/replay.md): which one is told by its first bytes.
#pragma once

#include <optional>
#include <string>

#include "routing/npy.hpp"

namespace heddle {

constexpr int most_recorded_experts = 1 << 20;  ///< ids of a recording are below

struct RecordedFile {
  NpyArray ids;                     ///< [tokens, layers, topk] or [prompts, steps, layers, topk]
  std::optional<NpyArray> weights;  ///< likewise
  std::optional<NpyArray> hidden;   ///< [tokens, hidden]
};

/// .npy (ids alone), .npz, safetensors, or vLLM's responses as JSON. An array of two axes is one layer's. Throws InputError: what
/// the file is, and what would be right.
RecordedFile read_recorded_file(const std::string& path);

/// Selections per expert: [steps, layers, experts], with which everything but copies of tokens can be said.
struct ExpertLoads {
  int steps = 0, layers = 0, experts = 0;
  std::vector<std::int64_t> counts;
  std::vector<std::string> notes;  ///< what a reader should know

  std::span<const std::int64_t> of(int step, int layer) const {
    const auto experts_size = static_cast<std::size_t>(experts);
    return std::span(counts).subspan(
        (static_cast<std::size_t>(step) * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) * experts_size,
        experts_size);
  }
};

/// Does the file hold counts of experts instead of ids: a dump of SGLang's recorder, or an array named logical_count?
bool holds_loads(const std::string& path);
/// SGLang's dumps (.pt): of the modes stat and stat_approx, and the counts of per_pass and per_token; .npz and safetensors with
/// logical_count [layers, experts] or [steps, layers, experts]. Steps without any selection are left out. Throws InputError.
ExpertLoads read_expert_loads(const std::string& path);

}  // namespace heddle
