#include "layer/cuda_rank_experts.hpp"

#include <algorithm>

#include "layer/arrived_rows.hpp"
#include "layer/expert_slices.hpp"
#include "layer/options.hpp"

namespace heddle {

namespace {

DeviceExperts make_experts(int gpu, int rank, const LayerWeights& weights, const LayerOptions& options, const RankRoom& room,
                           bool routed, const DeviceLayerOptions& device) {
  ExpertOptions arithmetic = expert_options(weights, options);
  arithmetic.activation_grid = device.activation_grid;
  DeviceExpertsOptions on;
  on.device = gpu;
  on.most_rows = room.pairs;
  on.most_tokens = routed ? room.arrived_tokens : 0;
  on.topk = weights.shape.topk;
  on.ctas = device.expert_ctas;
  on.fused_activation = device.fused_activation;
  on.row_blocks = device.row_blocks;
  on.step_exponents = device.step_exponents;
  if (options.expert_slices) {
    const SliceRange slice = slice_of_rank(weights.shape.intermediate, rank, weights.placement.ranks());
    on.slice_first = slice.first;
    on.slice_count = slice.count;
  }
  return DeviceExperts(weights.experts, weights.shape.hidden, weights.shape.intermediate, arithmetic, on);
}

/// The products take bf16 rows, and fp8 rows where activations are fp8: then rows were quantised for them.
bool must_widen(const ExchangeOptions& exchange, Activation activation) {
  return exchange.wire == Wire::nvfp4 || (exchange.wire == Wire::fp8 && activation == Activation::bf16);
}

bool any_arrives(std::span<const Chain> chains, ArrivedLayout layout) {
  return std::any_of(chains.begin(), chains.end(), [&](const Chain& chain) { return chain.exchange.arrived == layout; });
}

/// The most of each that a chain needs.
RankRoom room_of(std::span<const Chain> chains, int local_experts, bool widens) {
  RankRoom most;
  for (const Chain& chain : chains) {
    const RankRoom room = room_of(chain.exchange, local_experts);
    most.own_tokens = std::max(most.own_tokens, room.own_tokens);
    most.arrived_tokens = std::max(most.arrived_tokens, room.arrived_tokens);
    most.pairs = std::max(most.pairs, room.pairs);
    if (widens) most.rows = std::max(most.rows, room.rows);
    if (!chain.in_place) most.results = std::max(most.results, room.results);
  }
  return most;
}

}  // namespace

RankExperts::RankExperts(int gpu, int rank, const LayerWeights& weights, const LayerOptions& options, std::span<const Chain> chains,
                         const DeviceLayerOptions& device)
    : wire_(wire_format(chains.front().exchange)),
      topk_(chains.front().exchange.topk),
      widens_(must_widen(chains.front().exchange, activation_of(weights.kind, options))),
      room_(room_of(chains, static_cast<int>(weights.experts.size()), widens_)),
      experts_(make_experts(gpu, rank, weights, options, room_, any_arrives(chains, ArrivedLayout::routed), device)) {
  cuda::check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, gpu), "number of SMs");
  const auto hidden = static_cast<std::size_t>(wire_.hidden);
  results_ = DeviceArray<bf16>(gpu, room_.results * hidden);
  widened_ = DeviceArray<bf16>(gpu, room_.rows * hidden);
  if (!any_arrives(chains, ArrivedLayout::contiguous)) return;
  begins_ = DeviceArray<std::int32_t>(gpu, weights.experts.size());
  counts_ = DeviceArray<std::int32_t>(gpu, weights.experts.size());
}

std::size_t RankExperts::buffer_bytes() const {
  return experts_.buffer_bytes() + (room_.results + room_.rows) * static_cast<std::size_t>(wire_.hidden) * sizeof(bf16);
}

RowView RankExperts::view_of_rows(const Arrived& arrived, DeviceStream stream) {
  if (!widens_) return view_of(arrived.rows, arrived.row_stride, wire_);
  WidenCall call;
  call.rows = arrived.rows;
  call.row_stride = arrived.row_stride;
  call.wire = wire_;
  call.to = widened_.data();
  call.room = arrived.room;
  call.experts = experts_.count();
  call.begins = arrived.begins;
  call.counts = arrived.counts;
  call.local_ids = arrived.local_ids;
  call.topk = topk_;
  launch_widen(call, sms_, stream);
  const RowFormat plain{Wire::bf16, wire_.hidden, {}, 1.0f};
  return view_of(reinterpret_cast<const std::byte*>(widened_.data()), plain.row_bytes(), plain);
}

void RankExperts::run_contiguous(const Arrived& arrived, const ResultRows& out, int expected_rows, DeviceStream stream) {
  RunsCall runs;
  runs.begins = arrived.begins;
  runs.counts = arrived.counts;
  runs.experts = experts_.count();
  runs.room = arrived.room;
  runs.begins_out = begins_.data();
  runs.counts_out = counts_.data();
  launch_runs(runs, stream);
  Arrived limited = arrived;
  limited.begins = runs.begins_out;
  limited.counts = runs.counts_out;
  experts_.contiguous(view_of_rows(limited, stream), limited.begins, limited.counts, arrived.row_weights, out, stream,
                      expected_rows);
}

const bf16* RankExperts::run(const Arrived& arrived, bf16* in_place, int expected_rows, DeviceStream stream) {
  const ResultRows out{in_place != nullptr ? in_place : results_.data(), 0};
  switch (arrived.layout) {
    case ArrivedLayout::contiguous:
      run_contiguous(arrived, out, expected_rows, stream);
      break;
    case ArrivedLayout::masked:
      experts_.masked(view_of_rows(arrived, stream), arrived.block_rows, arrived.counts, arrived.row_weights, out, stream,
                      expected_rows);
      break;
    case ArrivedLayout::routed:
      experts_.routed(view_of_rows(arrived, stream), arrived.room, topk_, arrived.local_ids, arrived.weights,
                      arrived.slots_wanted ? RoutedOutput::slots : RoutedOutput::sum, out, stream, nullptr, expected_rows);
      break;
  }
  return out.values;
}

}  // namespace heddle
