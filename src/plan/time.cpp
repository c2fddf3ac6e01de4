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
  const int local = most_local_experts(shape.experts, request.ranks);
  const auto group_tokens = static_cast<std::uint64_t>(request.tokens) * static_cast<std::uint64_t>(request.ranks);
  return expert_floors(request, pair_counts(shape, request.ranks, request.tokens).per_rank,
                       expected_touched_experts(local, shape.experts, shape.topk, group_tokens));
}

Floors expert_floors(const PlanRequest& request, double rows, double touched) {
  const LayerShape& shape = request.shape;
  const bool fp8 = request.activation() == Activation::fp8;
  const double quantised =
      static_cast<double>(wire_row_bytes(fp8 ? Wire::fp8 : Wire::bf16, shape.intermediate, request.quantisation));

  Floors floors;
  floors.weights =
      over(touched * static_cast<double>(expert_weight_bytes(shape, request.weights).total()), request.machine.memory_read);
  floors.operations = over(6.0 * rows * shape.hidden * shape.intermediate, fp8 ? request.machine.fp8 : request.machine.bf16);
  floors.activation = over(rows * (2.0 * shape.intermediate * sizeof(bf16) + quantised), request.machine.memory_copy);
  return floors;
}

namespace {

/// Link bytes: of the busier direction, dispatch and combine together. Rows and pairs are those of one rank.
std::optional<TimeEstimate> estimate(Way way, const PlanRequest& request, double link_bytes, double rows, double pairs,
                                     const Floors& floors) {
  const Machine& machine = request.machine;
  const bool known = machine.link && machine.memory_read && machine.memory_copy && machine.word_latency && machine.launch &&
                     (request.activation() == Activation::fp8 ? machine.fp8 : machine.bf16);
  if (!known) {
    return std::nullopt;
  }
  const plan::WayTraits& way_traits = plan::traits(way);
  // A pass over arrived rows reads each once and writes it once for each of its local experts.
  const double pass = (rows + pairs) * static_cast<double>(dispatch_traffic(way, request).row_bytes);

  TimeEstimate estimate;
  estimate.exchange = way_traits.kernels * machine.launch->value + way_traits.rendezvous * machine.word_latency->value +
                      over(link_bytes, machine.link) + way_traits.local_passes * over(pass, machine.memory_copy);
  estimate.experts = std::max(floors.weights, floors.operations) + (way == Way::mega ? 0.0 : floors.activation);
  estimate.total = way == Way::mega ? std::max(estimate.exchange, estimate.experts) : estimate.exchange + estimate.experts;
  return estimate;
}

}  // namespace

std::optional<TimeEstimate> estimate_time(Way way, const PlanRequest& request) {
  const Traffic out = dispatch_traffic(way, request);
  const Traffic back = combine_traffic(way, request);
  return estimate(way, request, out.remote_bytes + back.remote_bytes, out.rows,
                  pair_counts(request.shape, request.ranks, request.tokens).per_rank, expert_floors(request));
}

std::optional<TimeEstimate> estimate_time(Way way, const PlanRequest& request, const RankWork& work) {
  const double row_bytes =
      static_cast<double>(dispatch_traffic(way, request).row_bytes) + static_cast<double>(combine_traffic(way, request).row_bytes);
  return estimate(way, request, work.link_rows * row_bytes, work.rows, work.pairs,
                  expert_floors(request, work.pairs, work.touched));
}

}  // namespace heddle
