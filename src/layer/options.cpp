// What a layer's options mean, and which of them fit together.
#include "layer/options.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "layer/candidates.hpp"
#include "layer/expert_slices.hpp"

namespace heddle {

namespace {

/// A shared expert that is one more routed expert is like the others.
void check_extra(const LayerWeights& weights, const LayerOptions& options) {
  const SharedExpert& shared = *weights.shared;
  const auto refuse = [](const std::string& text) { throw InputError("a shared expert as an extra routed expert: " + text); };
  if (options.way != Way::mega) refuse("only way mega has it; take shared = fused");
  if (!shared.gate.empty()) refuse("its routing weight is 1, but this one has a gate; take shared = alone");
  if (shared.weights.gate.kind != weights.kind)
    refuse("its weights are of another kind than the routed experts'; take shared = alone");
  if (shared.intermediate != weights.shape.intermediate) {
    refuse(fmt::format("its intermediate size is {}, that of the routed experts {}; take shared = alone", shared.intermediate,
                       weights.shape.intermediate));
  }
}

void check_shared(const LayerWeights& weights, const LayerOptions& options) {
  if (weights.shared && options.shared == SharedMode::extra) check_extra(weights, options);
  if (!weights.shared || options.shared == SharedMode::alone || options.way == Way::mega) return;
  if (weights.shared->intermediate != weights.shape.intermediate) {
    throw InputError(
        fmt::format("a shared expert of intermediate size {} cannot be fused with routed experts of {}; compute it alone",
                    weights.shared->intermediate, weights.shape.intermediate));
  }
}

void check_slices(const LayerWeights& weights, const LayerOptions& options) {
  if (options.expert_slices != weights.placement.is_everywhere()) {
    throw InputError(options.expert_slices
                         ? "expert_slices need Placement::everywhere: every rank holds a slice of every expert"
                         : "a placement of all experts on every rank needs expert_slices: each rank computes a slice of them");
  }
  if (!options.expert_slices) return;
  if (weights.shared && options.shared == SharedMode::fused)
    throw InputError("a shared expert cannot be fused with slices of routed experts: every rank has it whole; compute it alone");
  slice_of_rank(weights.shape.intermediate, 0, weights.placement.ranks());
}

}  // namespace

LayerSource source_of(const LayerCheckpoint& checkpoint) {
  LayerSource source;
  source.shape = checkpoint.shape();
  source.kind = checkpoint.kind();
  source.expert = [&checkpoint](int id) { return checkpoint.expert(id); };
  source.shared = checkpoint.shared();
  return source;
}

LayerWeights LayerWeights::load(const LayerSource& source, const Placement& placement, int rank) {
  LayerWeights weights;
  weights.shape = source.shape;
  weights.kind = source.kind;
  weights.placement = placement;
  for (const int expert : placement.experts_of(rank)) weights.experts.push_back(source.expert(expert));
  weights.shared = source.shared;
  return weights;
}

LayerWeights LayerWeights::common(const LayerSource& source, const Placement& placement) {
  return {source.shape, source.kind, placement, {}, source.shared, {}};
}

LayerRouter router_of(const LayerCheckpoint& checkpoint) {
  if (!checkpoint.has_router()) throw InputError("the checkpoint's layer has no router; bring ids and weights with the batch");
  const auto& options = checkpoint.router_options();
  if (!options) throw InputError("no config.json says how the checkpoint's router scores; make a LayerRouter with RouterOptions");
  return {checkpoint.router_weights(), checkpoint.router_bias(), *options};
}

void check_router(const LayerRouter& router, const LayerShape& shape) {
  const auto experts = static_cast<std::size_t>(shape.experts);
  const std::size_t wanted = experts * static_cast<std::size_t>(shape.hidden);
  if (router.weights.size() != wanted) {
    throw InputError(fmt::format("the router has {} weights, {} experts of hidden size {} want {}", router.weights.size(),
                                 shape.experts, shape.hidden, wanted));
  }
  if (router.options.topk != shape.topk)
    throw InputError(fmt::format("the router chooses {} experts a token, the layer has {}", router.options.topk, shape.topk));
  route({}, router.bias, 0, shape.experts, router.options);
}

ExchangeOptions exchange_options(const LayerWeights& weights, const LayerOptions& options) {
  if (options.way == Way::automatic)
    throw InputError("way auto has an exchange a candidate, not one; its memory is what layer_memory says");
  if (weights.shape.experts != weights.placement.experts()) {
    throw InputError(fmt::format("the layer has {} experts, the placement {}", weights.shape.experts, weights.placement.experts()));
  }
  check_shared(weights, options);
  check_slices(weights, options);
  ExchangeOptions exchange;
  exchange.way = options.way;
  exchange.hidden = weights.shape.hidden;
  exchange.topk = weights.shape.topk;
  exchange.cap = options.cap;
  exchange.placement = weights.placement;
  exchange.wire = options.wire.value_or(activation_of(weights.kind, options) == Activation::fp8 ? Wire::fp8 : Wire::bf16);
  exchange.combine_wire = options.combine_wire;
  exchange.quantisation = options.quantisation;
  exchange.arrived = layout_of(options.way, options.runner);
  exchange.weight_at = options.weight_at;
  exchange.reduce = options.reduce;
  exchange.mode = options.mode;
  exchange.combine = options.combine;
  exchange.cpu_sync = options.cpu_sync;
  exchange.gather = options.tensor_parallel && options.way == Way::gather ? GatherMode::tensor_parallel : options.gather;
  exchange.workers = options.workers;
  if (options.way == Way::mega) {
    const bool extra = weights.shared && options.shared == SharedMode::extra;
    exchange.mega = {weights.shape.intermediate,
                     weights.shared && !extra ? weights.shared->intermediate : 0,
                     activation_of(weights.kind, options),
                     options.block_rows,
                     options.ring,
                     extra};
  }
  if (exchange.gather == GatherMode::tensor_parallel && !options.tensor_parallel) {
    throw InputError("gather mode tensor_parallel needs tensor_parallel attention: every rank holds the whole batch");
  }
  check_options(exchange);
  return exchange;
}

int longest_slice(int tokens, int ranks, int cap) {
  const int longest = (tokens + ranks - 1) / ranks;
  if (longest <= cap) return longest;
  throw InputError(fmt::format(
      "a batch of {} tokens is up to {} for each of {} ranks, the cap is {}; create the layer with a cap of at least {}", tokens,
      longest, ranks, cap, longest));
}

std::string describe(const LayerWeights& weights, const LayerOptions& options) {
  const auto clamp = clamp_of(weights.shape, options);
  std::string text;
  if (options.way == Way::automatic) text += describe_choice(options);
  for (const LayerOptions& one : candidates_of(weights, options).options) text += describe(exchange_options(weights, one));
  text += fmt::format("intermediate={}\nweights={}\nactivation={}\nclamp={}\n", weights.shape.intermediate,
                      static_cast<int>(weights.kind), static_cast<int>(activation_of(weights.kind, options)),
                      clamp ? fmt::format("{}", *clamp) : "none");
  constexpr const char* modes[] = {"alone", "fused", "extra"};
  text += fmt::format("shared={}\n", weights.shared ? modes[static_cast<int>(options.shared)] : "none");
  return text + fmt::format("tensor_parallel={}\nexpert_slices={}\noverflow={}\n", options.tensor_parallel, options.expert_slices,
                            options.overflow == Overflow::split ? "split" : "error");
}

Step agree_step(Group& group, int tokens, Phase phase) {
  Step step;
  for (const std::string& text : group.exchange(fmt::format("{} {}", tokens, static_cast<int>(phase)), "agreement on the step")) {
    if (text.empty()) continue;
    std::size_t end = 0;
    step.max_tokens = std::max(step.max_tokens, std::stoi(text, &end));
    if (std::stoi(text.substr(end)) == static_cast<int>(Phase::prefill)) step.phase = Phase::prefill;
  }
  return step;
}

}  // namespace heddle
