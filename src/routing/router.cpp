#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "formats/wide.hpp"
#include "heddle/error.hpp"
#include "heddle/routing.hpp"
#include "routing/score.hpp"

namespace heddle {

namespace {

std::size_t product(int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); }

constexpr int lanes = 16;

/// Dot products of one token with `rows` weight rows. Lane j sums the elements j, j + 16, ... in
/// ascending order, then the lanes are added in halves: one order, whatever else is in the batch.
template <int rows>
[[gnu::always_inline]] inline void dot_rows(const float* token, const float* weights, int hidden_size, float* out) {
  const auto stride = static_cast<std::size_t>(hidden_size);
  float sums[rows][lanes] = {};
  const int whole = hidden_size / lanes * lanes;
  for (int at = 0; at < whole; at += lanes) {
    for (std::size_t row = 0; row < rows; ++row) {
      const float* w = weights + row * stride + at;
      for (int lane = 0; lane < lanes; ++lane) sums[row][lane] += token[at + lane] * w[lane];
    }
  }
  for (std::size_t row = 0; row < rows; ++row) {
    const float* w = weights + row * stride;
    for (int at = whole; at < hidden_size; ++at) sums[row][at - whole] += token[at] * w[at];
    for (int width = lanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) sums[row][lane] += sums[row][lane + width];
    }
    out[row] = sums[row][0];
  }
}

HEDDLE_WIDE void token_logits(const float* token, const float* weights, int hidden_size, int experts, float* out) {
  constexpr int block = 4;
  int expert = 0;
  for (; expert + block <= experts; expert += block) {
    dot_rows<block>(token, weights + product(expert, hidden_size), hidden_size, out + expert);
  }
  for (; expert < experts; ++expert) dot_rows<1>(token, weights + product(expert, hidden_size), hidden_size, out + expert);
}

/// Softmax over values; NaN stays NaN and stays out of the others' sum.
void softmax(std::span<float> values) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const float v : values) largest = v > largest ? v : largest;
  float sum = 0.0f;
  for (float& v : values) {
    if (std::isnan(v)) continue;
    v = score::exponential(v - largest);
    sum += v;
  }
  for (float& v : values) v /= sum;
}

/// What experts are ranked and weighed by; for softmax_topk the logits themselves.
void to_scores(std::span<float> values, Score kind) {
  switch (kind) {
    case Score::softmax:
      softmax(values);
      break;
    case Score::sigmoid:
      for (float& v : values) v = score::sigmoid(v);
      break;
    case Score::sqrtsoftplus:
      for (float& v : values) v = score::sqrt_softplus(v);
      break;
    case Score::softmax_topk:
      break;
  }
}

/// Higher first, NaN last, ties to the lower index.
struct Ranking {
  std::span<const float> values;
  bool operator()(int a, int b) const {
    const float x = values[static_cast<std::size_t>(a)], y = values[static_cast<std::size_t>(b)];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(y);
    return x > y || (!(y > x) && a < b);
  }
};

/// Keeps the best `count` of the indices, best first.
void keep_best(std::vector<int>& indices, int count, std::span<const float> values) {
  std::partial_sort(indices.begin(), indices.begin() + count, indices.end(), Ranking{values});
  indices.resize(static_cast<std::size_t>(count));
}

std::vector<int> all_indices(int count) {
  std::vector<int> indices(static_cast<std::size_t>(count));
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

/// Sum of a group's two best (of its only one); NaN counts as absent.
float group_score(std::span<const float> scores) {
  score::TwoBest best;
  for (const float v : scores) best.add(v);
  return best.sum(static_cast<int>(scores.size()));
}

/// The experts of the groups that may be chosen from.
std::vector<int> candidates(std::span<const float> scores, const RouterOptions& options) {
  const int experts = static_cast<int>(scores.size());
  if (options.groups == 1) return all_indices(experts);
  const int size = experts / options.groups;
  std::vector<float> group_scores;
  for (int group = 0; group < options.groups; ++group) {
    group_scores.push_back(group_score(scores.subspan(product(group, size), static_cast<std::size_t>(size))));
  }
  std::vector<int> groups = all_indices(options.groups);
  keep_best(groups, options.topk_groups, group_scores);
  std::vector<int> allowed;
  for (const int group : groups) {
    for (int i = 0; i < size; ++i) allowed.push_back(group * size + i);
  }
  return allowed;
}

/// From unbiased scores of the chosen experts to weights.
void to_weights(std::span<float> weights, const RouterOptions& options) {
  if (options.score == Score::softmax_topk) {
    softmax(weights);
  } else if (options.renormalise) {
    float sum = 0.0f;
    for (const float w : weights) sum += w;
    for (float& w : weights) w /= sum + 1e-20f;
  }
  for (float& w : weights) w *= options.scale;
}

void check_sizes(int tokens, int experts, std::size_t logits, std::size_t bias) {
  if (tokens < 0 || experts < 1 || logits != product(tokens, experts)) {
    throw InputError(fmt::format("router: {} logits for {} tokens and {} experts", logits, tokens, experts));
  }
  if (bias != 0 && bias != static_cast<std::size_t>(experts)) {
    throw InputError(fmt::format("router: a selection bias of {} values for {} experts", bias, experts));
  }
}

void check_options(const RouterOptions& options, int experts) {
  if (options.groups < 1 || experts % options.groups != 0) {
    throw InputError(fmt::format("router: {} experts do not divide into {} groups", experts, options.groups));
  }
  if (options.groups > 1 && options.score != Score::sigmoid && options.score != Score::sqrtsoftplus) {
    throw InputError(
        fmt::format("router: {} groups with a softmax score; a group limit needs sigmoid or sqrtsoftplus", options.groups));
  }
  if (options.topk_groups < 1 || options.topk_groups > options.groups) {
    throw InputError(fmt::format("router: {} groups to choose from, of {}", options.topk_groups, options.groups));
  }
  const int reachable = experts / options.groups * options.topk_groups;
  if (options.topk < 1 || options.topk > reachable) {
    throw InputError(fmt::format("router: top-k is {}, 1 to {} experts can be chosen ({} experts, {} of {} groups)", options.topk,
                                 reachable, experts, options.topk_groups, options.groups));
  }
}

}  // namespace

std::vector<float> router_logits(std::span<const bf16> hidden, std::span<const float> weights, int tokens, int hidden_size,
                                 int experts) {
  if (tokens < 0 || hidden_size < 1 || experts < 1 || hidden.size() != product(tokens, hidden_size) ||
      weights.size() != product(experts, hidden_size)) {
    throw InputError(fmt::format("router: {} hidden values and {} weights for {} tokens, {} experts and a hidden size of {}",
                                 hidden.size(), weights.size(), tokens, experts, hidden_size));
  }
  std::vector<float> logits(product(tokens, experts)), token(static_cast<std::size_t>(hidden_size));
  for (int t = 0; t < tokens; ++t) {
    const auto states = hidden.subspan(product(t, hidden_size), token.size());
    std::transform(states.begin(), states.end(), token.begin(), to_float);
    token_logits(token.data(), weights.data(), hidden_size, experts, logits.data() + product(t, experts));
  }
  return logits;
}

Routing route(std::span<const float> logits, std::span<const float> bias, int tokens, int experts, const RouterOptions& options) {
  check_sizes(tokens, experts, logits.size(), bias.size());
  check_options(options, experts);
  Routing routing{tokens, options.topk, {}, {}};
  routing.ids.reserve(product(tokens, options.topk));
  routing.weights.reserve(product(tokens, options.topk));
  std::vector<float> scores, selection, weights(static_cast<std::size_t>(options.topk));
  for (int token = 0; token < tokens; ++token) {
    const auto row = logits.subspan(product(token, experts), static_cast<std::size_t>(experts));
    scores.assign(row.begin(), row.end());
    to_scores(scores, options.score);
    selection = scores;
    for (std::size_t e = 0; e < bias.size(); ++e) selection[e] += bias[e];
    std::vector<int> chosen = candidates(selection, options);
    keep_best(chosen, options.topk, selection);
    std::transform(chosen.begin(), chosen.end(), weights.begin(), [&](int e) { return scores[static_cast<std::size_t>(e)]; });
    to_weights(weights, options);
    routing.ids.insert(routing.ids.end(), chosen.begin(), chosen.end());
    routing.weights.insert(routing.weights.end(), weights.begin(), weights.end());
  }
  return routing;
}

}  // namespace heddle
