// Routing: router scores and top-k, where each expert lives, recordings, generators, statistics.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heddle/formats.hpp"

namespace heddle {

/// The choices of T tokens: ids in [-1, experts), -1 meaning "no expert"; row-major [tokens, topk].
struct Routing {
  int tokens = 0;
  int topk = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

/// How logits become choices and weights.
enum class Score : std::uint8_t { softmax, sigmoid, sqrtsoftplus, softmax_topk };

/// Router settings of a model. The selection bias is an argument of route().
struct RouterOptions {
  Score score = Score::softmax;
  int topk = 1;
  int groups = 1;       ///< expert groups; 1: no group limit
  int topk_groups = 1;  ///< groups that may be chosen from
  bool renormalise = true;
  float scale = 1.0f;   ///< the model's routed scaling factor
};

/// f32 logits [tokens, experts] from bf16 hidden [tokens, hidden] and f32 weights [experts, hidden]
/// that hold bf16 (or f32) values exactly; products and sums in f32.
std::vector<float> router_logits(std::span<const bf16> hidden, std::span<const float> weights, int tokens, int hidden_size,
                                 int experts);

/// Choices from logits [tokens, experts]. bias [experts] selects only, may be empty. Ties go to the
/// lower id, NaN ranks lowest. Throws InputError for impossible options (numbers in the message).
Routing route(std::span<const float> logits, std::span<const float> bias, int tokens, int experts, const RouterOptions& options);

/// Which rank holds which expert. Contiguous by default: expert e on rank floor(e * R / E).
class Placement {
 public:
  Placement() = default;
  static Placement contiguous(int experts, int ranks);
  /// Any map; rank_of[e] in [0, ranks). Ranks without experts are legal.
  static Placement from_map(std::vector<int> rank_of, int ranks);

  int experts() const { return static_cast<int>(rank_of_.size()); }
  int ranks() const { return static_cast<int>(offsets_.size()) - 1; }
  int rank_of(int expert) const { return rank_of_[static_cast<std::size_t>(expert)]; }
  /// Index of an expert among its rank's experts, which are kept in ascending id.
  int local_index(int expert) const { return local_index_[static_cast<std::size_t>(expert)]; }
  std::span<const int> experts_of(int rank) const;
  /// Most experts any rank holds.
  int max_local_experts() const;
  std::span<const int> rank_map() const { return rank_of_; }
  std::span<const int> local_index_map() const { return local_index_; }

 private:
  std::vector<int> rank_of_, local_index_, experts_, offsets_;
};

/// Throws InputError naming token, choice and id if an id is outside [-1, experts) or repeats.
void check_choices(std::span<const std::int32_t> ids, int tokens, int topk, int experts);

}  // namespace heddle
