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

/// How logits become choices and weights: scores over all experts, or (softmax_topk) a softmax over the chosen ones.
enum class Score : std::uint8_t { softmax, sigmoid, sqrtsoftplus, softmax_topk };

/// Router settings of a model. The selection bias is an argument of route().
struct RouterOptions {
  Score score = Score::softmax;
  int topk = 1;
  int groups = 1;       ///< expert groups; 1: no group limit
  int topk_groups = 1;  ///< groups that may be chosen from
  bool renormalise = true;
  float scale = 1.0f;  ///< the model's routed scaling factor
};

/// f32 logits [tokens, experts] from bf16 hidden [tokens, hidden] and f32 weights [experts, hidden]
/// that hold bf16 (or f32) values exactly; products and sums in f32, in an order that depends on
/// hidden_size alone. Throws InputError where a size does not match.
std::vector<float> router_logits(std::span<const bf16> hidden, std::span<const float> weights, int tokens, int hidden_size,
                                 int experts);

/// Choices from logits [tokens, experts], best first. bias [experts] selects only, may be empty. Ties
/// go to the lower id; NaN ranks lowest and stays out of the softmax of the others. softmax_topk
/// ignores `renormalise`: its weights sum to 1 already. A group limit (a group counts by the sum of
/// its two best) is for sigmoid and sqrtsoftplus. Throws InputError for impossible options (numbers
/// in the message).
Routing route(std::span<const float> logits, std::span<const float> bias, int tokens, int experts, const RouterOptions& options);

/// In place of a rank: every rank holds the expert, or a slice of it.
inline constexpr int every_rank = -2;

/// Which rank holds which expert. Contiguous by default: expert e on rank floor(e * R / E).
class Placement {
 public:
  Placement() = default;
  static Placement contiguous(int experts, int ranks);
  /// Any map; rank_of[e] in [0, ranks). Ranks without experts are legal.
  static Placement from_map(std::vector<int> rank_of, int ranks);
  /// Every rank holds (a slice of) every expert, expert e as its local expert e.
  static Placement everywhere(int experts, int ranks);

  int experts() const { return static_cast<int>(rank_of_.size()); }
  int ranks() const { return offsets_.empty() ? 0 : static_cast<int>(offsets_.size()) - 1; }
  bool is_everywhere() const { return !rank_of_.empty() && rank_of_.front() == every_rank; }
  /// every_rank for all experts where they are everywhere.
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

/// Recorded router decisions: [tokens, layers, topk] of prompt tokens, [prompts, steps, layers, topk] of decode steps, or
/// [tokens, topk] of one layer. Files are .npy (C order, little-endian, int16, int32, int64, uint8 or uint16 ids), .npz or
/// safetensors with topk_ids and perhaps topk_weights and hidden_states, or vLLM's responses (docs/replay.md).
class Recording {
 public:
  /// Weights come from the file, or from a companion .npy of the same shape (uint16 in units of 1e-4, float16 or
  /// float32), else they are 1 / topk. Without weights_path it is looked for beside X.ids.npy as
  /// X.weights_e4.npy or X.weights.npy. A companion of fewer tokens (or prompts) cuts the recording
  /// to those. Prompt tokens without any choice in any layer, as vLLM tells of those that its prefix cache answered, are left out.
  /// Throws InputError (file, what, what would be right) for unreadable or damaged files.
  static Recording open(const std::string& path, const std::string& weights_path = "");

  int layers() const { return layers_; }
  int topk() const { return topk_; }
  int prompts() const { return prompts_; }                                   ///< 0 for prompt tokens
  int steps() const { return steps_; }                                       ///< where take() may begin: decode steps, or tokens
  int tokens() const { return prompts_ == 0 ? steps_ : steps_ * prompts_; }  ///< of each layer
  int least_experts() const { return least_experts_; }                       ///< the largest id plus one
  bool has_weights() const { return !weights_.empty(); }
  int left_out() const { return left_out_; }  ///< tokens without any choice
  int hidden() const { return hidden_; }      ///< of hidden_states(); 0: none were recorded
  /// [tokens, hidden], the same for all layers; of prompt tokens only.
  const std::vector<bf16>& hidden_states() const { return hidden_states_; }

  /// `tokens` tokens of one layer. Prompt tokens: consecutive ones from token `step` on. Decode: a
  /// token of each prompt from step `step`, then of each from the next step, until there are enough.
  /// Throws InputError if the recording ends before that.
  Routing take(int layer, int step, int tokens) const;

 private:
  void leave_out_empty();

  int layers_ = 0, topk_ = 0, prompts_ = 0, steps_ = 0, least_experts_ = 0, left_out_ = 0, hidden_ = 0;
  std::string path_;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
  std::vector<bf16> hidden_states_;
};

/// Maps id e to factor * e + hash(token, choice) mod factor, so that a recording of few experts can
/// stand in for a layer with more; -1 stays. With mix(x) the output function of splitmix64 on state
/// x + 0x9E3779B97F4A7C15, the hash is mix(mix(token) + choice); tokens count from 0 in `routing`.
Routing expand(const Routing& routing, int factor);

/// How popular each expert is, in any unit; not negative. What draw_routing draws from.
using Popularity = std::vector<double>;
Popularity uniform_popularity(int experts);
/// The n-th most popular expert (from 1) weighs n^-exponent; which expert that is, the seed decides.
Popularity zipf_popularity(int experts, double exponent, std::uint64_t seed);
/// Only the experts of one rank; choices beyond their number fall on the others.
Popularity hot_rank_popularity(const Placement& placement, int rank);

/// Selections per expert that were counted over a text.
struct ExpertCounts {
  std::string model, domain;
  int layer = 0;
  std::int64_t tokens = 0;
  Popularity counts;
};
/// Reads a table with the columns model, domain, layer, tokens, e0, e1 ...; models with fewer experts
/// leave the last cells empty. Throws InputError naming file and line.
std::vector<ExpertCounts> read_expert_counts(const std::string& path);

/// A synthetic routing. The same options give the same bits on every machine.
struct DrawOptions {
  int tokens = 0;
  int topk = 1;
  std::uint64_t seed = 0;
  double missing = 0.0;  ///< share of choices that become -1, with weight 0
  float scale = 1.0f;    ///< what the positive weights of a token sum to
};
/// k distinct ids a token, one after the other, each by popularity among those not taken yet; when
/// only experts of popularity 0 are left, uniformly among them. Throws InputError.
Routing draw_routing(const Popularity& popularity, const DrawOptions& options);

/// What a routing asks of the ranks. A pair is a (token, choice) that is not -1.
struct RoutingLoad {
  std::int64_t pairs = 0;
  std::int64_t copies = 0;                    ///< (token, rank) that have a pair: one copy a rank
  std::vector<std::int64_t> pairs_of_expert;  ///< rows an expert computes
  std::vector<std::int64_t> pairs_of_rank;    ///< rows a rank receives with one copy an expert
  std::vector<std::int64_t> copies_of_rank;   ///< rows a rank receives with one copy a rank
  double pairs_a_token = 0.0;
  double copies_a_token = 0.0;
  double expert_max_over_mean = 0.0;  ///< of pairs_of_expert; 0 where there are no pairs
  double rank_max_over_mean = 0.0;    ///< of pairs_of_rank
  double copies_max_over_mean = 0.0;  ///< of copies_of_rank
};
/// Throws InputError as check_choices does.
RoutingLoad measure_load(const Routing& routing, const Placement& placement);

/// Ranks a token needs on average if k distinct experts are equally likely: sum over ranks of
/// 1 - C(E - E_r, k) / C(E, k), which is G (1 - C(E - E/G, k) / C(E, k)) where all ranks hold E/G.
double expected_copies(const Placement& placement, int topk);
/// The same if each of k choices falls on any of G ranks independently: G (1 - (1 - 1/G)^k).
double expected_copies_independent(int topk, int ranks);

}  // namespace heddle
