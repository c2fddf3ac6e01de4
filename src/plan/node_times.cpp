// The time of dispatch, experts and combine on one node or several: measured latencies, rates, and the bytes of each level.
#include <algorithm>

#include "heddle/node_plan.hpp"
#include "plan/ways.hpp"

namespace heddle {

namespace {

WayFit fit_of(Way way, const Machine& machine) {
  if (machine.fit) {
    for (const WayFit& fit : machine.fit->ways) {
      if (fit.way == way) return fit;
    }
  }
  const plan::WayTraits& traits = plan::traits(way);
  const double launch = machine.launch ? traits.kernels * machine.launch->value : 0;
  const double words = machine.word_latency ? traits.rendezvous * machine.word_latency->value : 0;
  return {way, (launch + words) / 2, (launch + words) / 2};
}

double over(double amount, const std::optional<MachineValue>& rate) { return rate ? amount / rate->value : 0.0; }

/// Rows are moved at both levels at once; a word follows them to every level they cross.
double moved(const NodeTraffic& traffic, NodeMode mode, const PlanRequest& request, double slowdown) {
  const Machine& machine = request.machine;
  const double inside = slowdown * over(traffic.inside.bytes, machine.link);
  if (request.nodes == 1) return inside;
  const double latency = machine.network_latency ? machine.network_latency->value : 0;
  const double hop = mode == NodeMode::hybrid && machine.word_latency ? machine.word_latency->value : 0;
  return std::max(inside, over(traffic.between.bytes, machine.network)) + latency + hop;
}

/// Bytes that a rank reads and writes again once rows have arrived.
struct Passes {
  double dispatch = 0;  ///< laying rows out for the runner
  double combine = 0;   ///< sums: at the expert's rank, and at home
};

Passes passes_of(Way way, const PlanRequest& request, double rows, double rows_back) {
  const double pairs = static_cast<double>(request.tokens) * request.shape.topk;
  const auto row = static_cast<double>(wire_row_bytes(request.wire, request.shape.hidden, request.quantisation));
  const auto back = static_cast<double>(wire_row_bytes(request.combine_wire, request.shape.hidden, request.quantisation));
  const bool lays_out = plan::traits(way).local_passes > 0;
  const bool by_choice = plan::traits(way).copies == plan::Copies::every_choice;
  Passes passes;
  passes.dispatch = lays_out ? (rows + pairs) * row : 0;
  passes.combine = (rows_back + request.tokens) * back + (lays_out && !by_choice ? pairs * back : 0);
  return passes;
}

}  // namespace

std::optional<NodeTimes> estimate_node_time(Way way, NodeMode mode, NodeSums sums, const PlanRequest& request) {
  const Machine& machine = request.machine;
  const NodeTraffic out = node_dispatch_traffic(way, mode, request);
  const NodeTraffic back = node_combine_traffic(way, mode, sums, request);
  if (!machine.link || (request.nodes > 1 && !machine.network)) return std::nullopt;
  const WayFit fit = fit_of(way, machine);
  const bool low_latency = way == Way::low_latency;
  const double copies = low_latency
                            ? request.shape.topk
                            : expected_copies(request.shape.experts, request.shape.topk, request.ranks, request.group_limit);
  const double rows_back = sums == NodeSums::home && !low_latency ? request.shape.topk : copies;
  const Passes passes = passes_of(way, request, request.tokens * copies, request.tokens * rows_back);

  NodeTimes times;
  times.dispatch = fit.dispatch + moved(out, mode, request, fit.dispatch_slowdown) +
                   fit.dispatch_slowdown * over(passes.dispatch, machine.memory_copy);
  if (machine.fit && request.wire != Wire::bf16 && machine.fit->quantise_rate > 0)
    times.dispatch +=
        machine.fit->quantise + static_cast<double>(request.tokens) * request.shape.hidden / machine.fit->quantise_rate;
  times.combine = fit.combine + moved(back, mode, request, fit.combine_slowdown) +
                  fit.combine_slowdown * over(passes.combine, machine.memory_copy);
  const Floors floors = expert_floors(request);
  const double slowdown = machine.fit ? machine.fit->experts_slowdown : 1;
  const double least = std::max(floors.weights, slowdown * (floors.operations + floors.activation));
  if (least > 0) times.experts = (machine.fit ? machine.fit->experts : 0) + least;
  return times;
}

}  // namespace heddle
