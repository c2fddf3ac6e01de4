// The words of weight formats and activations: as files and commands have them, and as errors say them.
#pragma once

#include <string_view>
#include <utility>

#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

inline constexpr std::pair<WeightKind, std::string_view> weight_words[] = {{WeightKind::bf16, "bf16"},
                                                                           {WeightKind::fp8_block, "fp8_block"},
                                                                           {WeightKind::mxfp4, "mxfp4"},
                                                                           {WeightKind::nvfp4, "nvfp4"},
                                                                           {WeightKind::mxfp8, "mxfp8"}};
inline constexpr std::pair<Activation, std::string_view> activation_words[] = {{Activation::fp8, "fp8"},
                                                                               {Activation::bf16, "bf16"}};

/// Of one of the lists above; "unknown" for what is not in it.
template <class Words, class Value>
constexpr std::string_view word_in(const Words& words, Value value) {
  for (const auto& [one, word] : words) {
    if (one == value) return word;
  }
  return "unknown";
}

/// In a sentence.
constexpr std::string_view kind_text(WeightKind kind) {
  return kind == WeightKind::fp8_block ? "fp8 block" : word_in(weight_words, kind);
}

}  // namespace heddle
