// The shape of one MoE layer and of a call. Everything here is a run-time value.
#pragma once

#include <cstdint>
#include <optional>

#include "heddle/formats.hpp"

namespace heddle {

/// Where the routing weight of a pair is applied.
enum class WeightAt : std::uint8_t { activation, combine };

/// Sizes of one MoE layer. hidden and intermediate are multiples of 64.
struct LayerShape {
  int hidden = 0;              ///< H
  int intermediate = 0;        ///< D of the routed experts
  int experts = 0;             ///< E, over all ranks
  int topk = 0;                ///< k, choices a token
  std::optional<float> clamp;  ///< L of the SwiGLU clamp, none if the model has none
};

/// How activations are quantised before a GEMM (and on an fp8 wire): values a group, scale format.
struct Quantisation {
  int group = 128;  ///< 128 or 32
  ScaleFormat scale = ScaleFormat::ue8m0;
};

/// What enters the GEMMs: e4m3 groups, or bf16 as it is.
enum class Activation : std::uint8_t { fp8, bf16 };

/// Is any rank working on prompt tokens in this call?
enum class Phase : std::uint8_t { decode, prefill };

/// The same on all ranks: the largest batch of any rank and the phase (docs/architecture.md, "step").
struct Step {
  int max_tokens = 0;
  Phase phase = Phase::decode;
};

}  // namespace heddle
