// Recordings cut into steps.
#include <fmt/format.h>

#include <algorithm>

#include "heddle/error.hpp"
#include "replay/replay.hpp"

namespace heddle::replay {

namespace {

/// Steps of the recording that a step of the replay takes.
int recorded_steps(const Recording& recording, int tokens) {
  return recording.prompts() == 0 ? tokens : (tokens + recording.prompts() - 1) / recording.prompts();
}

int usual_tokens(const Recording& recording) {
  constexpr int most = 4096;
  return recording.prompts() > 0 ? recording.prompts() : std::min(most, recording.tokens());
}

}  // namespace

Routing take_step(const Recording& recording, const Cut& cut, int tokens, int layer, int step) {
  Routing routing = recording.take(layer, step * recorded_steps(recording, tokens), tokens);
  return cut.expand > 1 ? expand(routing, cut.expand) : routing;
}

Source source_of(const Recording& recording, const Cut& cut) {
  if (cut.expand < 1) throw InputError(fmt::format("expansion by {}: at least 1 is needed", cut.expand));
  if (static_cast<std::int64_t>(recording.least_experts()) * cut.expand > cut.experts) {
    throw InputError(fmt::format("the recording names {} experts{}, the layer has {}; give --experts with as many",
                                 static_cast<std::int64_t>(recording.least_experts()) * cut.expand,
                                 cut.expand > 1 ? fmt::format(" expanded {} times", cut.expand) : "", cut.experts));
  }
  const int tokens = cut.tokens.value_or(usual_tokens(recording));
  if (tokens < 1 || tokens > recording.tokens()) {
    throw InputError(fmt::format("a step of {} tokens; the recording has 1 to {} of each layer", tokens, recording.tokens()));
  }
  Source source;
  source.layers = recording.layers();
  source.steps = recording.steps() / recorded_steps(recording, tokens);
  if (cut.steps) source.steps = std::min(source.steps, *cut.steps);
  if (source.steps < 1) throw InputError("at least 1 step is replayed");
  source.experts = cut.experts;
  source.topk = recording.topk();
  source.tokens = tokens;
  source.rows = [&recording, cut, tokens](int layer, int step, const ReplicaMap& map, CopyRule rule) {
    return count_rows(take_step(recording, cut, tokens, layer, step), map, rule);
  };
  source.loads = [&recording, cut, tokens](int layer, int step) {
    std::vector<double> loads(static_cast<std::size_t>(cut.experts), 0.0);
    for (const std::int32_t id : take_step(recording, cut, tokens, layer, step).ids) {
      if (id >= 0) loads[static_cast<std::size_t>(id)] += 1.0;
    }
    return loads;
  };
  return source;
}

Source source_of(const ExpertLoads& loads, int topk, std::optional<int> steps) {
  Source source;
  source.layers = loads.layers;
  source.steps = std::min(loads.steps, steps.value_or(loads.steps));
  if (source.steps < 1) throw InputError("at least 1 step is replayed");
  source.experts = loads.experts;
  source.topk = topk;
  source.has_copies = false;
  source.rows = [&loads, topk](int layer, int step, const ReplicaMap& map, CopyRule) {
    return count_rows(loads.of(step, layer), topk, map);
  };
  source.loads = [&loads](int layer, int step) {
    const auto counts = loads.of(step, layer);
    return std::vector<double>(counts.begin(), counts.end());
  };
  return source;
}

}  // namespace heddle::replay
