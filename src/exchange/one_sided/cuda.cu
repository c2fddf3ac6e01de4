#include "exchange/cuda_counters.cuh"
#include "exchange/one_sided/protocol.hpp"

namespace heddle {

namespace {

struct OneSidedCall : DeviceCall {
  OneSidedLayout layout;
  OneSidedScratch scratch;  ///< of the first local rank
  ArrivedRouting routing;
};

__device__ OneSidedScratch scratch_of(const OneSidedCall& call) {
  OneSidedScratch scratch = call.scratch;
  scratch.sent = of_this_rank(scratch.sent, call);
  scratch.arrived = of_this_rank(scratch.arrived, call);
#pragma unroll
  for (int p = 0; p < OneSidedLayout::max_extra_payloads; ++p) scratch.extra[p] = call.ranks[blockIdx.y].input.extra[p];
  return scratch;
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) one_sided_dispatch(const __grid_constant__ OneSidedCall call) {
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  const SendInput input = send_input(call);
  const OneSidedScratch scratch = scratch_of(call);
  if (call.send) {
    if (!check_input(w, call, input) || !one_sided_send(w, call.layout, call.max_tokens, input, call.placement, scratch)) return;
  }
  if (call.receive) {
    const ArrivedRouting routing{call.topk, of_this_rank(call.routing.local_ids, call), of_this_rank(call.routing.weights, call)};
    const std::int32_t* arrived = one_sided_receive(w, call.layout, scratch);
    if (arrived == nullptr) return;
    PairCount pairs(w, call);
    one_sided_list(w, call.layout, call.max_tokens, call.placement, arrived, routing, pairs);
    pairs.add_up();
    tally_dispatch(
        call, [&](int d) { return scratch.sent.totals[d]; }, [&](int s) { return arrived[s]; }, [](int) { return 0; });
  }
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) one_sided_combine(const __grid_constant__ OneSidedCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const SendInput input = send_input(call);
  const OneSidedScratch scratch = scratch_of(call);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  if (call.send && !one_sided_offer(w, call.layout, call.max_tokens, rank.results, scratch)) return;
  if (!call.receive) return;
  if (one_sided_pull(w, call.layout, call.max_tokens, input, scratch, shared_rows(call), rank.output.out)) tally_combine(call);
}

class DeviceOneSided final : public DeviceWay<OneSidedCall> {
 public:
  DeviceOneSided(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                 const DeviceExchangeOptions& device_options)
      : DeviceWay(workspace, gpu, options, memory, device_options,
                  {one_sided_dispatch<RowMover::any>, one_sided_dispatch<RowMover::plain>, one_sided_dispatch<RowMover::bulk>},
                  {one_sided_combine<RowMover::any>, one_sided_combine<RowMover::plain>, one_sided_combine<RowMover::bulk>}) {
    parameters_.layout = make_layout<OneSidedLayout>(options, areas());
    OneSidedLayout& layout = parameters_.layout;
    for (const std::size_t bytes : options.extra_payloads) layout.extra_bytes[layout.extra_payloads++] = bytes;
    const auto r = static_cast<std::size_t>(ranks());
    const auto k = static_cast<std::size_t>(options.topk);
    ScratchPlan plan;
    const NumberingPlan sent = plan_numbering(plan, static_cast<std::size_t>(options.cap) * r, r, options.cap, set_chunk);
    const std::size_t counts = plan.take(r * sizeof(std::int32_t));
    local_ids_ = plan.take(layout.blocks() * k * sizeof(std::int32_t));
    weights_ = plan.take(layout.blocks() * k * sizeof(float));
    allocate_scratch(plan);
    parameters_.scratch.sent = at(sent);
    parameters_.scratch.arrived = at<std::int32_t>(counts);
    parameters_.routing = {options.topk, at<std::int32_t>(local_ids_), at<float>(weights_)};
  }

  Arrived arrived(int local) const override {
    const OneSidedLayout& layout = parameters_.layout;
    Arrived arrived;
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = workspace_.view(gpu_).at<std::byte>(rank_of(local), layout.rows());
    arrived.row_stride = layout.wire.row_bytes();
    arrived.room = ranks() * call_.max_tokens;
    arrived.received = -1;
    arrived.real = -1;
    arrived.local_ids = at<std::int32_t>(local_ids_, local);
    arrived.weights = at<float>(weights_, local);
    for (int p = 0; p < layout.extra_payloads; ++p) {
      arrived.extra.push_back(workspace_.view(gpu_).at<std::byte>(rank_of(local), layout.extra(p, 0)));
    }
    return arrived;
  }

  bf16* result_rows(int local) const override {
    if (options_.combine_wire != Wire::bf16) return nullptr;
    return workspace_.view(gpu_).at<bf16>(rank_of(local), parameters_.layout.result(0));
  }

 private:
  std::size_t local_ids_ = 0, weights_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_one_sided(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                        const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  return std::make_unique<DeviceOneSided>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
