// A call of more tokens than the cap, cut into passes (Overflow::split): the same ones on all ranks, as they follow from the step.
#pragma once

#include <algorithm>
#include <limits>

#include "heddle/layer.hpp"

namespace heddle {

struct Passes {
  int size = 0;   ///< tokens of a pass: a rank's, under tensor-parallel attention the whole batch's
  int count = 1;  ///< at least one: a call without tokens is a call, too

  static Passes of(const LayerOptions& options, int ranks, const Step& step) {
    const long long most = static_cast<long long>(options.cap) * (options.tensor_parallel ? ranks : 1);
    const auto size = static_cast<int>(std::min<long long>(most, std::numeric_limits<int>::max()));
    if (options.overflow != Overflow::split || step.max_tokens <= size) return {std::max(step.max_tokens, 0), 1};
    return {size, step.max_tokens / size + (step.max_tokens % size != 0 ? 1 : 0)};
  }

  int first(int pass) const { return pass * size; }
  bool is_last(int pass) const { return pass + 1 == count; }
  /// The step of a pass; that of the first is the largest.
  Step step(int pass, const Step& whole) const {
    return count == 1 ? whole : Step{std::min(size, whole.max_tokens - first(pass)), whole.phase};
  }
  /// Of a rank's `tokens`; ranks that have run out take part with none.
  int tokens(int pass, int tokens) const {
    if (count == 1) return tokens;
    return std::clamp(tokens - first(pass), 0, size);
  }
};

}  // namespace heddle
