#include "layer/body.hpp"

#include <fmt/format.h>

#include <cmath>

#include "layer/options.hpp"
#include "layer/token_sizes.hpp"

namespace heddle {

LayerBody::LayerBody(int rank, std::function<void(std::uint64_t, std::uint64_t)> refuse, LayerWeights weights,
                     const LayerOptions& options)
    : weights_(std::move(weights)),
      options_(options),
      exchange_options_(exchange_options(weights_, options)),
      rank_(rank),
      refuse_(std::move(refuse)) {}

ExpertOptions LayerBody::arithmetic() const { return expert_options(weights_, options_); }

const float* LayerBody::gate_shared(const LayerInput& own) {
  if (!weights_.shared || weights_.shared->gate.empty()) return nullptr;
  const auto values = static_cast<std::size_t>(own.tokens) * hidden();
  shared_factors_ = router_logits({own.hidden, values}, weights_.shared->gate, own.tokens, weights_.shape.hidden, 1);
  for (float& value : shared_factors_) value = 1.0f / (1.0f + std::exp(-value));
  return shared_factors_.data();
}

void LayerBody::update_expert(int local, const ExpertWeights& weights) {
  if (options_.expert_slices)
    throw InputError("a layer of expert slices keeps copies of its slices; make it anew for other weights");
  const auto own = static_cast<int>(weights_.placement.experts_of(rank_).size());
  if (local < 0 || local >= own) throw InputError(fmt::format("weights of local expert {}; rank {} has {}", local, rank_, own));
  experts().update(local, weights);
  weights_.experts[static_cast<std::size_t>(local)] = weights;
}

void LayerBody::check_outputs(const LayerInput& input, const bf16* out) const {
  if (input.tokens <= 0 || out != nullptr) return;
  refuse_(static_cast<std::uint64_t>(input.tokens), 0);
  throw InputError(fmt::format("rank {} has no memory for the outputs of its {} tokens", rank_, input.tokens));
}

void LayerBody::check_batch(const LayerInput& input, const Step& step, const bf16* out) const {
  check_outputs(input, out);
  if (!options_.tensor_parallel) return;
  longest_slice(step.max_tokens, weights_.placement.ranks(), options_.cap);
  check_whole_batch(input, step);
}

void LayerBody::check_whole(const LayerInput& input, const Step& step, const bf16* out) const {
  check_outputs(input, out);
  if (options_.tensor_parallel) return check_whole_batch(input, step);
  if (input.tokens >= 0 && input.tokens <= step.max_tokens) return;
  refuse_(static_cast<std::uint64_t>(step.max_tokens), static_cast<std::uint64_t>(input.tokens));
  throw InputError(
      fmt::format("rank {} brings {} tokens, the step says that no rank has more than {}", rank_, input.tokens, step.max_tokens));
}

void LayerBody::check_whole_batch(const LayerInput& input, const Step& step) const {
  if (input.tokens == step.max_tokens) return;
  refuse_(static_cast<std::uint64_t>(step.max_tokens), static_cast<std::uint64_t>(input.tokens));
  throw InputError(
      fmt::format("rank {} brings {} tokens, the step says {}; under tensor-parallel attention every rank brings the whole batch",
                  rank_, input.tokens, step.max_tokens));
}

void LayerBody::forward(const LayerInput& input, const Step& step, bf16* out) {
  report_ = {};
  watch_.lap();
  check_batch(input, step, out);
  // With any other way than gather under tensor-parallel attention this rank's slice of the input, else all of it.
  const bool slice = options_.tensor_parallel && exchange_options_.gather != GatherMode::tensor_parallel;
  const int ranks = weights_.placement.ranks();
  const int first = slice ? slice_begin(input.tokens, rank_, ranks) : 0;
  LayerInput own = TokenSizes::of(weights_.shape).from(input, first);
  own.tokens = (slice ? slice_begin(input.tokens, rank_ + 1, ranks) : input.tokens) - first;
  const Step own_step{slice ? longest_slice(step.max_tokens, ranks, options_.cap) : step.max_tokens, step.phase};
  if (slice) slice_out_.resize(static_cast<std::size_t>(own.tokens) * hidden());
  CombineOutput output;
  output.out = slice ? slice_out_.data() : out;
  // Whether outputs are shared is decided by what all ranks see alike, never by a pointer: without tokens `out` may be null.
  output.all_out = options_.tensor_parallel && input.tokens > 0 ? out : nullptr;
  output.first = first;
  output.all_tokens = input.tokens;
  run(own, own_step, output);
}

}  // namespace heddle
