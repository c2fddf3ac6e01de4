// What a layer's options mean where they leave something open.
#pragma once

#include "heddle/layer.hpp"

namespace heddle {

/// The activation as asked, else what weights of this kind want.
inline Activation activation_of(WeightKind kind, const LayerOptions& options) {
  return options.activation.value_or(kind == WeightKind::bf16 ? Activation::bf16 : Activation::fp8);
}

}  // namespace heddle
