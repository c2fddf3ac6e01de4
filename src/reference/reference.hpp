// The float64 reference of one MoE layer: it rounds at the points of docs/numerics.md and computes
// everything else in double. Written apart from the engines, with which it shares only the scalar formats, so
// that an agreement between the two means something.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "heddle/checkpoint.hpp"
#include "heddle/experts.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// How the results of a token's pairs become its output (docs/numerics.md, "The token's output").
enum class Sum : std::uint8_t {
  slots,      ///< one result a choice, summed at home: low_latency, mega, elastic with reduce = home
  two_stage,  ///< one partial sum a rank: gather, normal, one_sided, elastic with reduce = rank
};

/// The arithmetic of a call.
struct ReferenceOptions {
  Activation activation = Activation::fp8;
  Quantisation quantisation;   ///< of activations, an fp8 wire and the scales of an fp8 combine wire
  std::optional<float> clamp;  ///< L; none: no clamp
  WeightAt weight_at = WeightAt::activation;
  Sum sum = Sum::slots;
  Wire wire = Wire::bf16;                       ///< of the hidden states on their way to the experts
  Wire combine_wire = Wire::bf16;               ///< of the results on their way back
  float wire_global_scale = 1.0f;               ///< g of the nvfp4 wires, above zero
  std::optional<Activation> shared_activation;  ///< of the shared expert; none: as `activation`
  int threads = 0;                              ///< 0: one a core. Never changes a bit
};

/// A layer and a batch. Everything is a view or a callback and must outlive the call.
struct ReferenceInput {
  int hidden = 0;                            ///< H, a multiple of 64
  int intermediate = 0;                      ///< D of the routed experts, a multiple of 64
  int experts = 0;                           ///< E
  int tokens = 0;                            ///< T of all ranks together; 0 is legal
  int topk = 0;                              ///< k
  std::span<const bf16> hidden_states;       ///< [T, H]
  std::span<const std::int32_t> ids;         ///< [T, k], in [-1, E), -1: no expert; none twice within a token
  std::span<const float> weights;            ///< [T, k]
  std::function<ExpertWeights(int)> expert;  ///< weights of an expert; called once for each that has pairs, from the calling thread
  const SharedExpert* shared = nullptr;      ///< none: no shared expert
  std::span<const int> rank_of;              ///< [E], needed by Sum::two_stage only (Placement::rank_map())
};

/// The output of every token, [T, H]. It needs 2·T·k·H bytes beside its arguments.
/// Throws InputError for sizes, ids, options or weights that docs/numerics.md does not allow.
std::vector<bf16> reference_layer(const ReferenceInput& input, const ReferenceOptions& options);

/// How far two results lie apart. NaN agrees with any NaN in the same place, an infinity only with itself.
struct Comparison {
  double relative_error = 0.0;      ///< ‖a - b‖ / ‖b‖ in the Euclidean norm; infinite where NaN or infinity do not agree
  double largest_difference = 0.0;  ///< of one element; infinite likewise
  std::size_t different_bits = 0;   ///< elements whose bits differ (two NaN do not)
  bool has_nan_mismatch = false;    ///< NaN on one side only
};

/// Compares a with b, the one that is trusted. Throws InputError if their lengths differ.
Comparison compare(std::span<const bf16> a, std::span<const bf16> b);

/// What results that are added where they arrive (Combine::add) may be further away than slots: each of k additions rounds a part
/// of the sum to bf16 (docs/numerics.md).
inline double error_of_additions(int topk) { return 2.5e-3 * std::sqrt((topk + 1) / 2.0); }

}  // namespace heddle
