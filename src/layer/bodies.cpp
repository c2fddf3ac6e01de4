#include "layer/bodies.hpp"

#include <fmt/format.h>

#include "layer/options.hpp"
#include "layer/passes.hpp"
#include "layer/token_sizes.hpp"

namespace heddle {

namespace {

void add(PhaseReport& sum, const PhaseReport& more) {
  sum.seconds += more.seconds;
  sum.remote_bytes += more.remote_bytes;
  sum.between_bytes += more.between_bytes;
  sum.local_bytes += more.local_bytes;
}

void add(LayerReport& sum, const LayerReport& more) {
  for (const auto phase : {&LayerReport::dispatch, &LayerReport::regroup, &LayerReport::gemm1, &LayerReport::activation,
                           &LayerReport::gemm2, &LayerReport::combine}) {
    add(sum.*phase, more.*phase);
  }
  sum.shared_seconds += more.shared_seconds;
  sum.experts_seconds += more.experts_seconds;
  for (const auto rows : {&LayerReport::rows_sent, &LayerReport::rows_received, &LayerReport::rows_real, &LayerReport::rows_room}) {
    sum.*rows += more.*rows;
  }
  sum.layout = more.layout;
  sum.host_waited = sum.host_waited || more.host_waited;
}

}  // namespace

LayerBodies::LayerBodies(const LayerWeights& weights, const LayerOptions& options, const Make& make)
    : shape_(weights.shape),
      options_(options),
      ranks_(weights.placement.ranks()),
      router_(weights.router),
      chooser_(weights, options, candidates_of(weights, options), host_machine()) {
  if (router_) check_router(*router_, shape_);
  for (const LayerOptions& one : chooser_.options()) bodies_.push_back(make(one));
}

void LayerBodies::forward(const LayerInput& input, const Step& step, bf16* out) {
  const Passes passes = Passes::of(options_, ranks_, step);
  LayerBody& body = *bodies_[chooser_.pick(passes.step(0, step))];
  if (passes.count > 1) body.check_whole(input, step, out);
  const TokenSizes sizes = TokenSizes::of(shape_);
  LayerReport report;
  for (int pass = 0; pass < passes.count; ++pass) {
    const int tokens = passes.tokens(pass, input.tokens);
    const int first = tokens == 0 ? 0 : passes.first(pass);  // a rank that has run out has no arrays there
    LayerInput part = sizes.from(input, first);
    part.tokens = tokens;
    body.forward(part, passes.step(pass, step), sizes.outputs_from(out, first));
    add(report, body.report());
  }
  report.way = body.way();
  report.passes = passes.count;
  report_ = report;
}

void LayerBodies::forward(int tokens, const bf16* hidden, const Step& step, bf16* out) {
  if (!router_) throw InputError("the layer has no router (LayerWeights::router); call with ids and weights");
  LayerInput input{tokens, hidden, nullptr, nullptr};
  if (tokens > 0 && hidden != nullptr) {
    const std::span rows(hidden, static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape_.hidden));
    const std::vector<float> logits = router_logits(rows, router_->weights, tokens, shape_.hidden, shape_.experts);
    routing_ = route(logits, router_->bias, tokens, shape_.experts, router_->options);
    input.ids = routing_.ids.data();
    input.weights = routing_.weights.data();
  } else {
    routing_ = {0, shape_.topk, {}, {}};
  }
  forward(input, step, out);
}

void LayerBodies::update_expert(int local, const ExpertWeights& weights) {
  for (const auto& body : bodies_) body->update_expert(local, weights);
}

WayChoice LayerBodies::explain(const Step& step) const {
  return chooser_.explain(Passes::of(options_, ranks_, step).step(0, step));
}

}  // namespace heddle
