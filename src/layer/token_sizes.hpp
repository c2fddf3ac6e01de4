// Where a call's arrays go on from one of its tokens.
#pragma once

#include <cstddef>

#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// Values a token has in the arrays of a call.
struct TokenSizes {
  std::size_t hidden = 0;  ///< in hidden states and outputs
  std::size_t topk = 0;    ///< in ids and weights

  static TokenSizes of(const LayerShape& shape) {
    return {static_cast<std::size_t>(shape.hidden), static_cast<std::size_t>(shape.topk)};
  }

  /// A LayerInput's or DeviceInput's arrays from token `first` on; those that are null stay so. How many tokens are left is the
  /// caller's to say.
  template <class Input>
  Input from(Input input, int first) const {
    const auto token = static_cast<std::size_t>(first);
    if (input.hidden != nullptr) input.hidden += token * hidden;
    if (input.ids != nullptr) input.ids += token * topk;
    if (input.weights != nullptr) input.weights += token * topk;
    return input;
  }
  bf16* outputs_from(bf16* out, int first) const { return out == nullptr ? out : out + static_cast<std::size_t>(first) * hidden; }
};

}  // namespace heddle
