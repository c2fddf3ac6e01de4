// Choices and weights from logits, as route() on the host makes them: a CTA a token. An expert's place is the number of experts
// that are better, so any top-k costs the same and nothing is sorted. In a header, so that the emulator can run it
// (tests/emulator_router_test.cpp).
#pragma once

#include <bit>
#include <cstddef>

#include "routing/router_kernel.hpp"
#include "routing/score.hpp"
#include "signal/ptx.cuh"

namespace heddle::router_kernel {

inline constexpr int choice_threads = 256;

struct ChoiceShared {
  float scores[most_routed_experts];
  float chosen[most_routed_experts];  ///< scores of the chosen, best first
  std::uint64_t keys[most_routed_experts];
  std::uint64_t group_keys[most_routed_experts];
  float sum;
};

/// visit(i) for i in [0, count), spread over the CTA.
template <class Visit>
__device__ void for_all(int count, Visit visit) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += choice_threads) visit(i);
}

/// Larger is better: the value, NaN below all others and zeros alike, then the lower index. Above 0.
__device__ inline std::uint64_t key_of(float value, int index) {
  const auto bits = std::bit_cast<std::uint32_t>(value == 0.0f ? 0.0f : value);
  std::uint32_t order = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  if (score::is_nan(value)) order = 0;
  return static_cast<std::uint64_t>(order) << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(index));
}

/// How many of the keys are better.
__device__ inline int place_of(std::uint64_t key, const std::uint64_t* keys, int count) {
  int place = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) place += keys[i] > key ? 1 : 0;
  return place;
}

/// The sum in ascending order, NaN left out; by every thread alike.
__device__ inline float sum_in_order(const float* values, int count) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < count; ++i) sum += score::is_nan(values[i]) ? 0.0f : values[i];
  return sum;
}

/// In place; every warp looks for the largest by itself. Begins and ends with all threads together.
__device__ inline void softmax(ChoiceShared& shared, float* values, int count) {
  constexpr int lanes = 32;
  float largest = -std::numeric_limits<float>::infinity();
  for (int i = static_cast<int>(threadIdx.x) % lanes; i < count; i += lanes) largest = values[i] > largest ? values[i] : largest;
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, distance);
    largest = other > largest ? other : largest;
  }
  __syncthreads();
  // What was NaN stays out of the sum; what becomes NaN, an infinity less another, does not.
  bool spoilt = false;
  for_all(count, [&](int i) {
    const float before = values[i];
    values[i] = score::exponential(before - largest);
    spoilt |= score::is_nan(values[i]) && !score::is_nan(before);
  });
  if (threadIdx.x == 0) shared.sum = 0.0f;
  __syncthreads();
  if (spoilt) shared.sum = std::numeric_limits<float>::quiet_NaN();  // any thread: the same value
  __syncthreads();
  if (threadIdx.x < lanes) {
    const float sum = sum_in_order(values, count) + shared.sum;
    __syncwarp();
    if (threadIdx.x == 0) shared.sum = sum;
  }
  __syncthreads();
  for_all(count, [&](int i) { values[i] /= shared.sum; });
  __syncthreads();
}

__device__ inline void score_logits(const RouterCall& call, ChoiceShared& shared, int token) {
  const float* logits = call.logits + static_cast<std::size_t>(token) * static_cast<std::size_t>(call.experts);
  for_all(call.experts, [&](int e) {
    const float logit = logits[e];
    shared.scores[e] = call.options.score == Score::sigmoid        ? score::sigmoid(logit)
                       : call.options.score == Score::sqrtsoftplus ? score::sqrt_softplus(logit)
                                                                   : logit;
  });
  __syncthreads();
  if (call.options.score == Score::softmax) softmax(shared, shared.scores, call.experts);
}

/// Keys of the experts that may be chosen; 0 for the others.
__device__ inline void rank_experts(const RouterCall& call, ChoiceShared& shared) {
  const auto selection = [&](int e) { return call.bias == nullptr ? shared.scores[e] : shared.scores[e] + call.bias[e]; };
  const int groups = call.options.groups, size = call.experts / groups;
  if (groups > 1) {
    for_all(groups, [&](int group) {
      score::TwoBest best;
      for (int i = 0; i < size; ++i) best.add(selection(group * size + i));
      shared.group_keys[group] = key_of(best.sum(size), group);
    });
    __syncthreads();
  }
  for_all(call.experts, [&](int e) {
    const bool allowed = groups == 1 || place_of(shared.group_keys[e / size], shared.group_keys, groups) < call.options.topk_groups;
    shared.keys[e] = allowed ? key_of(selection(e), e) : 0;
  });
  __syncthreads();
}

__device__ inline void store_weights(const RouterCall& call, ChoiceShared& shared, float* weights) {
  const RouterOptions& options = call.options;
  if (options.score == Score::softmax_topk) softmax(shared, shared.chosen, options.topk);
  float divisor = 1.0f;
  if (options.score != Score::softmax_topk && options.renormalise) {
    float sum = 0.0f;
    for (int i = 0; i < options.topk; ++i) sum += shared.chosen[i];
    divisor = sum + 1e-20f;
  }
  for_all(options.topk, [&](int i) { weights[i] = shared.chosen[i] / divisor * options.scale; });
}

/// Tokens by CTA.
__device__ inline void choose(const RouterCall& call, ChoiceShared& shared) {
  const int tokens = max(0, min(*call.tokens, call.most_tokens));
  for (int token = static_cast<int>(blockIdx.x); token < tokens; token += static_cast<int>(gridDim.x)) {
    const std::size_t row = static_cast<std::size_t>(token) * static_cast<std::size_t>(call.options.topk);
    score_logits(call, shared, token);
    rank_experts(call, shared);
    for_all(call.experts, [&](int e) {
      const int place = place_of(shared.keys[e], shared.keys, call.experts);
      if (place >= call.options.topk) return;
      call.ids[row + static_cast<std::size_t>(place)] = e;
      shared.chosen[place] = shared.scores[e];
    });
    __syncthreads();
    store_weights(call, shared, call.weights + row);
    __syncthreads();
  }
}

}  // namespace heddle::router_kernel
