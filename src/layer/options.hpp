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
