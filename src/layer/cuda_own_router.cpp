#include "layer/cuda_own_router.hpp"

#include <fmt/format.h>

#include <limits>

#include "layer/options.hpp"
#include "layer/passes.hpp"

namespace heddle {

namespace {

/// Tokens of a rank in a pass, at most.
int most_tokens_of(const LayerParts& parts, const LayerOptions& options) {
  LayerOptions split = options;
  split.overflow = Overflow::split;
  return Passes::of(split, parts.workspace.ranks(), {std::numeric_limits<int>::max(), Phase::decode}).size;
}

DeviceRouter make_router(const LayerParts& parts, const LayerWeights& weights, int most_tokens) {
  const LayerRouter& router = *weights.router;
  check_router(router, weights.shape);
  return {parts.device(), router.weights, router.bias, weights.shape.experts, weights.shape.hidden, router.options, most_tokens};
}

}  // namespace

OwnRouter::OwnRouter(const LayerParts& parts, const LayerWeights& weights, const LayerOptions& options)
    : locals_(parts.locals()),
      choices_a_rank_(static_cast<std::size_t>(most_tokens_of(parts, options)) * parts.sizes.topk),
      router_(make_router(parts, weights, most_tokens_of(parts, options))),
      ids_(parts.device(), locals_ * choices_a_rank_),
      weights_(parts.device(), locals_ * choices_a_rank_) {}

void OwnRouter::choose(std::span<DeviceInput> inputs, int max_tokens, DeviceStream stream) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    DeviceInput& input = inputs[i];
    if (input.ids != nullptr || input.weights != nullptr) continue;
    std::int32_t* ids = ids_.data() + i * choices_a_rank_;
    float* weights = weights_.data() + i * choices_a_rank_;
    if (input.hidden != nullptr) router_.route(input, max_tokens, ids, weights, stream);  // else it has no tokens
    input.ids = ids;
    input.weights = weights;
  }
}

std::size_t OwnRouter::buffer_bytes() const {
  return router_.buffer_bytes() + locals_ * choices_a_rank_ * (sizeof(std::int32_t) + sizeof(float));
}

void refuse_missing_ids(std::span<const DeviceInput> inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].hidden == nullptr || inputs[i].ids != nullptr || inputs[i].weights != nullptr) continue;
    throw InputError(fmt::format(
        "local rank {} brings hidden states without ids and weights, and the layer has no router (LayerWeights::router)", i));
  }
}

}  // namespace heddle
