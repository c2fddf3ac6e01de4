// What a layer's options mean where they leave something open.
#pragma once

#include "heddle/layer.hpp"

namespace heddle {

/// The activation as asked, else what weights of this kind want.
inline Activation activation_of(WeightKind kind, const LayerOptions& options) {
  return options.activation.value_or(kind == WeightKind::bf16 ? Activation::bf16 : Activation::fp8);
}

/// The clamp as asked, else the model's.
inline std::optional<float> clamp_of(const LayerShape& shape, const LayerOptions& options) {
  return options.clamp ? options.clamp : shape.clamp;
}

/// The arithmetic of a layer's experts, the shared one included.
inline ExpertOptions expert_options(const LayerWeights& weights, const LayerOptions& options) {
  ExpertOptions result;
  result.activation = activation_of(weights.kind, options);
  result.quantisation = options.quantisation;
  result.clamp = clamp_of(weights.shape, options);
  result.weight_at = options.weight_at;
  return result;
}

/// A layer's own router, sizes and settings, before any call: what fails in one would fail on this rank alone. Throws InputError.
void check_router(const LayerRouter& router, const LayerShape& shape);

/// Where rank `rank`'s slice of a batch begins that every rank has: tensor-parallel attention by ways other than gather.
inline int slice_begin(int tokens, int rank, int ranks) { return static_cast<int>(static_cast<long long>(tokens) * rank / ranks); }
/// The tokens of the longest of those slices. Throws InputError where they are more than the cap.
int longest_slice(int tokens, int ranks, int cap);

/// Where a layer's experts live on so many ranks where nothing else is said.
inline Placement default_placement(const LayerShape& shape, int ranks, const LayerOptions& options) {
  return options.expert_slices ? Placement::everywhere(shape.experts, ranks) : Placement::contiguous(shape.experts, ranks);
}

/// The layout that a runner takes from a way; whether the way can hand it over is another question.
inline ArrivedLayout layout_of(Way way, RunnerKind runner) {
  switch (runner) {
    case RunnerKind::contiguous:
      return ArrivedLayout::contiguous;
    case RunnerKind::masked:
      return ArrivedLayout::masked;
    case RunnerKind::routed:
      return ArrivedLayout::routed;
    case RunnerKind::automatic:
      break;
  }
  return default_layout(way);
}

}  // namespace heddle
