// Lower bounds and a model of one layer's time.
#include <algorithm>

#include "heddle/plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

namespace {

double over(double amount, const std::optional<MachineValue>& rate) { return rate ? amount / rate->value : 0.0; }

}  // namespace

Floors expert_floors(const PlanRequest& request) {
  const LayerShape& shape = request.shape;
  const bool fp8 = request.activation() == Activation::fp8;
  const double rows = pair_counts(shape, request.ranks, request.tokens).per_rank;
  const int local = most_local_experts(shape.experts, request.ranks);
  const auto group_tokens = static_cast<std::uint64_t>(request.tokens) * static_cast<std::uint64_t>(request.ranks);
  const double touched = expected_touched_experts(local, shape.experts, shape.topk, group_tokens);
  const double quantised =
      static_cast<double>(wire_row_bytes(fp8 ? Wire::fp8 : Wire::bf16, shape.intermediate, request.quantisation));

  Floors floors;
  floors.weights =
      over(touched * static_cast<double>(expert_weight_bytes(shape, request.weights).total()), request.machine.memory_read);
  floors.operations = over(6.0 * rows * shape.hidden * shape.intermediate, fp8 ? request.machine.fp8 : request.machine.bf16);
  floors.activation = over(rows * (2.0 * shape.intermediate * sizeof(bf16) + quantised), request.machine.memory_copy);
  return floors;
}

std::optional<TimeEstimate> estimate_time(Way way, const PlanRequest& request) {
  const Machine& machine = request.machine;
  const bool known = machine.link && machine.memory_read && machine.memory_copy && machine.word_latency && machine.launch &&
                     (request.activation() == Activation::fp8 ? machine.fp8 : machine.bf16);
  if (!known) {
    return std::nullopt;
  }
  const plan::WayTraits& way_traits = plan::traits(way);
  const Traffic out = dispatch_traffic(way, request);
  const Traffic back = combine_traffic(way, request);
  // A pass over arrived rows reads each once and writes it once for each of its local experts.
  const double pairs = pair_counts(request.shape, request.ranks, request.tokens).per_rank;
  const double pass = (out.rows + pairs) * static_cast<double>(out.row_bytes);

  TimeEstimate estimate;
  estimate.exchange = way_traits.kernels * machine.launch->value + way_traits.rendezvous * machine.word_latency->value +
                      over(out.remote_bytes + back.remote_bytes, machine.link) +
                      way_traits.local_passes * over(pass, machine.memory_copy);
  const Floors floors = expert_floors(request);
  estimate.experts = std::max(floors.weights, floors.operations) + (way == Way::mega ? 0.0 : floors.activation);
  estimate.total = way == Way::mega ? std::max(estimate.exchange, estimate.experts) : estimate.exchange + estimate.experts;
  return estimate;
}

}  // namespace heddle
