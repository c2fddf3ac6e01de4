// Which bodies a layer has, and what they need.
#include "heddle/layer.hpp"

#include <fmt/format.h>

#include <utility>

#include "layer/bodies.hpp"
#include "signal/fault.hpp"

namespace heddle {

namespace {

/// A rank of the host engine.
LayerSeat seat_of(Workspace& workspace, const ExchangeMemory& memory, const ExchangeOptions& options) {
  LayerSeat seat;
  seat.rank = workspace.group().rank();
  seat.exchange = create_exchange(workspace, options, memory);
  seat.refuse = [&workspace](std::uint64_t expected, std::uint64_t seen) { workspace.refuse(expected, seen); };
  seat.fail = [&workspace] { raise_abort(workspace.view(), {{WordKind::failed, -1, -1}, workspace.view().rank, 0, 0}); };
  return seat;
}

}  // namespace

MoeLayer::MoeLayer(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights, const LayerOptions& options)
    : bodies_(std::make_unique<LayerBodies>(weights, options, [&](const LayerOptions& one) {
        // Weights are views: every body has the same ones.
        if (one.way == Way::mega) return make_fused(workspace, memory, weights, one);
        return make_chain(seat_of(workspace, memory, exchange_options(weights, one)), weights, one);
      })) {}
MoeLayer::MoeLayer(LayerSeat seat, LayerWeights weights, const LayerOptions& options) {
  if (options.way == Way::automatic) throw InputError("a layer over a seat has the seat's exchange alone; name its way");
  bodies_ = std::make_unique<LayerBodies>(weights, options,
                                          [&](const LayerOptions& one) { return make_chain(std::move(seat), weights, one); });
}
MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

void MoeLayer::forward(const LayerInput& input, const Step& step, bf16* out) { bodies_->forward(input, step, out); }
void MoeLayer::forward(int tokens, const bf16* hidden, const Step& step, bf16* out) { bodies_->forward(tokens, hidden, step, out); }
const Routing& MoeLayer::routing() const { return bodies_->routing(); }
const LayerReport& MoeLayer::report() const { return bodies_->report(); }
void MoeLayer::update_expert(int local, const ExpertWeights& weights) { bodies_->update_expert(local, weights); }
WayChoice MoeLayer::explain(const Step& step) const { return bodies_->explain(step); }

ExchangeMemory layer_memory(const LayerWeights& weights, const LayerOptions& options) {
  ExchangeMemory memory;
  for (const LayerOptions& one : candidates_of(weights, options).options)
    memory.include(exchange_memory(exchange_options(weights, one)));
  return memory;
}

ContextPlan plan_context(std::span<const ContextLayer> layers) {
  if (layers.empty()) throw InputError("a context without layers needs no workspace");
  const int ranks = layers.front().placement.ranks();
  ContextPlan plan;
  for (const ContextLayer& layer : layers) {
    if (layer.placement.ranks() != ranks) {
      throw InputError(fmt::format("layers on {} and on {} ranks cannot share a workspace", ranks, layer.placement.ranks()));
    }
    const LayerWeights weights = LayerWeights::common(*layer.source, layer.placement);
    plan.memory.include(layer_memory(weights, layer.options));
    plan.configuration += describe(weights, layer.options);
  }
  plan.heap_bytes = plan.memory.heap_bytes(ranks);
  return plan;
}

}  // namespace heddle
