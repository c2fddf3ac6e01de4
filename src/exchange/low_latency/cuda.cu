#include "exchange/cuda_counters.cuh"
#include "exchange/low_latency/protocol.hpp"

namespace heddle {

namespace {

struct LowLatencyCall : DeviceCall {
  LowLatencyLayout layout;
  LowLatencyScratch scratch;  ///< of the first local rank
  bool weighted = false;
};

__device__ LowLatencyScratch scratch_of(const LowLatencyCall& call) {
  LowLatencyScratch scratch = call.scratch;
  scratch.sent = of_this_rank(scratch.sent, call);
  scratch.arrived = of_this_rank(scratch.arrived, call);
  if (scratch.sent_counts != nullptr) scratch.sent_counts = of_this_rank(scratch.sent_counts, call);
  scratch.rows = of_this_rank(scratch.rows, call);
  scratch.origins = of_this_rank(scratch.origins, call);
  scratch.weights = of_this_rank(scratch.weights, call);
  scratch.counts = of_this_rank(scratch.counts, call);
  return scratch;
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) low_latency_dispatch(const __grid_constant__ LowLatencyCall call) {
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  const LowLatencyScratch scratch = scratch_of(call);
  if (call.send) {
    const SendInput input = send_input(call);
    if (!check_input(w, call, input) || !low_latency_send(w, call.layout, input, call.placement, scratch)) return;
  }
  if (!call.receive) return;
  const int local_experts = call.placement.experts_on[w.heap().rank];
  const std::int32_t* arrived = low_latency_hear(w, call.layout, local_experts, scratch);
  if (arrived == nullptr) return;
  low_latency_pack(w, call.layout, local_experts, arrived, scratch);
  const int ranks = w.heap().ranks;
  const auto from = [&](int s) {
    int rows = 0;
    for (int e = 0; e < local_experts; ++e) rows += arrived[e * ranks + s];
    return rows;
  };
  tally_dispatch(
      call, [&](int e) { return w.live(call.placement.rank_of[e]) ? scratch.sent_counts[e] : 0; }, from,
      [&](int e) { return scratch.counts[e]; });
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) low_latency_combine(const __grid_constant__ LowLatencyCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const LowLatencyScratch scratch = scratch_of(call);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  if (call.send && !low_latency_return(w, call.layout, call.placement.experts_on[w.heap().rank], rank.results, scratch)) return;
  if (!call.receive) return;
  if (low_latency_collect(w, call.layout, send_input(call), call.placement, call.weighted, shared_rows(call), rank.output.out))
    tally_combine(call);
}

class DeviceLowLatency final : public DeviceWay<LowLatencyCall> {
 public:
  DeviceLowLatency(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                   const DeviceExchangeOptions& device_options)
      : DeviceWay(
            workspace, gpu, options, memory, device_options,
            {low_latency_dispatch<RowMover::any>, low_latency_dispatch<RowMover::plain>, low_latency_dispatch<RowMover::bulk>},
            {low_latency_combine<RowMover::any>, low_latency_combine<RowMover::plain>, low_latency_combine<RowMover::bulk>}) {
    parameters_.layout = make_layout<LowLatencyLayout>(options, areas());
    parameters_.weighted = options.weight_at == WeightAt::combine;
    const auto local = static_cast<std::size_t>(std::max(1, parameters_.layout.shape.max_local_experts));
    const int block_rows = ranks() * options.cap;
    const std::size_t room = local * static_cast<std::size_t>(block_rows);
    ScratchPlan plan;
    const int pairs = options.cap * options.topk;
    const NumberingPlan sent =
        plan_numbering(plan, static_cast<std::size_t>(pairs), static_cast<std::size_t>(call_.experts), pairs, kind_chunk);
    const std::size_t arrived_counts = plan.take(local * static_cast<std::size_t>(ranks()) * sizeof(std::int32_t));
    rows_ = plan.take(room * parameters_.layout.wire.row_bytes());
    const std::size_t origins = plan.take(room * sizeof(PairOrigin));
    weights_ = plan.take(room * sizeof(float));
    counts_ = plan.take(local * sizeof(std::int32_t));
    begins_ = plan.take(local * sizeof(std::int32_t));
    const std::size_t sent_counts = plan.take(static_cast<std::size_t>(call_.experts) * sizeof(std::int32_t));
    allocate_scratch(plan);
    LowLatencyScratch& scratch = parameters_.scratch;
    scratch.sent = at(sent);
    if (device_options.counters) scratch.sent_counts = at<std::int32_t>(sent_counts);
    scratch.arrived = at<std::int32_t>(arrived_counts);
    scratch.block_rows = block_rows;
    scratch.rows = at<std::byte>(rows_);
    scratch.origins = at<PairOrigin>(origins);
    scratch.weights = at<float>(weights_);
    scratch.counts = at<std::int32_t>(counts_);
    std::vector<std::int32_t> begins(local);
    for (std::size_t e = 0; e < local; ++e) begins[e] = static_cast<std::int32_t>(e) * block_rows;
    for (int rank = 0; rank < local_ranks(); ++rank) {
      cuda::check(cudaMemcpy(at<std::int32_t>(begins_, rank), begins.data(), local * sizeof(std::int32_t), cudaMemcpyHostToDevice),
                  "copying of block begins");
    }
  }

  Arrived arrived(int local) const override {
    Arrived arrived;
    arrived.layout = ArrivedLayout::masked;
    arrived.wire = options_.wire;
    arrived.rows = at<std::byte>(rows_, local);
    arrived.row_stride = parameters_.layout.wire.row_bytes();
    arrived.block_rows = parameters_.scratch.block_rows;
    arrived.room = experts_of(local) * arrived.block_rows;
    arrived.received = -1;
    arrived.real = -1;
    arrived.begins = at<std::int32_t>(begins_, local);
    arrived.counts = at<std::int32_t>(counts_, local);
    arrived.row_weights = at<float>(weights_, local);
    return arrived;
  }

 private:
  std::size_t rows_ = 0, weights_ = 0, counts_ = 0, begins_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_low_latency(DeviceWorkspace& workspace, std::size_t gpu,
                                                          const ExchangeOptions& options, const ExchangeMemory& memory,
                                                          const DeviceExchangeOptions& device) {
  return std::make_unique<DeviceLowLatency>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
