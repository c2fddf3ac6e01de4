// Which body a layer has.
#include "heddle/layer.hpp"

#include "layer/body.hpp"
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

MoeLayer::MoeLayer(Workspace& workspace, const ExchangeMemory& memory, LayerWeights weights, const LayerOptions& options) {
  if (options.way == Way::mega) {
    body_ = make_fused(workspace, memory, std::move(weights), options);
    return;
  }
  LayerSeat seat = seat_of(workspace, memory, exchange_options(weights, options));
  body_ = make_chain(std::move(seat), std::move(weights), options);
}
MoeLayer::MoeLayer(LayerSeat seat, LayerWeights weights, const LayerOptions& options)
    : body_(make_chain(std::move(seat), std::move(weights), options)) {}
MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

void MoeLayer::forward(const LayerInput& input, const Step& step, bf16* out) { body_->forward(input, step, out); }

const LayerReport& MoeLayer::report() const { return body_->report(); }

}  // namespace heddle
