#include "exchange/cuda_counters.cuh"
#include "exchange/gather/protocol.hpp"

namespace heddle {

namespace {

struct GatherCall : DeviceCall {
  GatherLayout layout;
  GatherMode mode = GatherMode::padded;
  // Scratch of the first local rank.
  std::int32_t* counts = nullptr;  ///< [ranks]
  ArrivedRouting routing;
  const std::byte* zeros = nullptr;  ///< a record
  std::byte* sums = nullptr;         ///< a record a worker
};

/// Where this rank's rows begin, and how many there are in all.
struct Span {
  int first = 0;
  int rows = 0;
};

template <bool plain>
__device__ Span span_of(const DeviceWorker<plain>& w, const GatherCall& call, const std::int32_t* counts) {
  const HeapView& heap = w.heap();
  if (call.mode == GatherMode::padded) return {heap.rank * call.max_tokens, heap.ranks * call.max_tokens};
  Span span;
  for (int s = 0; s < heap.ranks; ++s) {
    const int tokens = w.live(s) ? counts[s] : 0;
    if (s < heap.rank) span.first += tokens;
    span.rows += tokens;
  }
  return span;
}

/// Sends this rank's tokens; counts [ranks]: everybody's, where they are needed first.
template <bool plain>
__device__ bool send(DeviceWorker<plain>& w, const GatherCall& call, const SendInput& input, std::int32_t* counts) {
  if (!check_input(w, call, input)) return false;
  const std::int32_t* heard = counts;
  if (call.mode != GatherMode::padded) heard = gather_exchange_counts(w, call.layout, input.tokens, counts);
  if (heard == nullptr) return false;
  const Span span = span_of(w, call, heard);
  if (call.mode == GatherMode::zero_filled) {
    std::byte* sum = of_this_rank(call.sums, call) + static_cast<std::size_t>(w.index()) * call.layout.record_bytes();
    return gather_all_reduce(w, call.layout, static_cast<std::size_t>(span.rows), static_cast<std::size_t>(span.first), input,
                             of_this_rank(call.zeros, call), sum);
  }
  return gather_send(w, call.layout, static_cast<std::size_t>(span.first), input);
}

template <bool plain>
__global__ void __launch_bounds__(threads_a_cta, 1) gather_dispatch(const __grid_constant__ GatherCall call) {
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  std::int32_t* counts = of_this_rank(call.counts, call);
  if (call.send && !send(w, call, send_input(call), counts)) return;
  if (!call.receive || !w.begin()) return;
  // Where rows are summed the sending half has heard all there is to hear, and left the counts a kernel or a meeting ago.
  const std::int32_t* heard = call.mode == GatherMode::zero_filled ? counts : gather_hear(w, call.layout, counts);
  if (heard == nullptr) return;
  const ArrivedRouting routing{call.topk, of_this_rank(call.routing.local_ids, call), of_this_rank(call.routing.weights, call)};
  const Span span = span_of(w, call, heard);
  gather_list(w, call.layout, w.heap().ranks * call.max_tokens, call.placement, routing, [&](int row) {
    return call.mode == GatherMode::padded ? row % call.max_tokens >= heard[row / call.max_tokens] : row >= span.rows;
  });
  const int tokens = send_input(call).tokens;
  tally_dispatch(
      call, [&](int d) { return w.live(d) ? tokens : 0; }, [&](int s) { return w.live(s) ? heard[s] : 0; }, [](int) { return 0; });
}

template <bool plain>
__global__ void __launch_bounds__(threads_a_cta, 1) gather_combine(const __grid_constant__ GatherCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  const Span span = span_of(w, call, of_this_rank(call.counts, call));
  if (call.send && !gather_offer(w, call.layout, span.rows, rank.results)) return;
  if (!call.receive) return;
  if (gather_pull(w, call.layout, static_cast<std::size_t>(span.first), send_input(call).tokens, shared_rows(call),
                  rank.output.out))
    tally_combine(call);
}

class DeviceGather final : public DeviceWay<GatherCall> {
 public:
  DeviceGather(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
               const DeviceExchangeOptions& device_options)
      : DeviceWay(workspace, gpu, options, memory, device_options, {gather_dispatch<false>, gather_dispatch<true>},
                  {gather_combine<false>, gather_combine<true>}) {
    if (options.gather == GatherMode::tensor_parallel)
      throw InputError("gather under tensor-parallel attention is not on GPUs yet; the host engine has it");
    parameters_.layout = make_layout<GatherLayout>(options, areas());
    parameters_.mode = options.gather;
    const GatherLayout& layout = parameters_.layout;
    const std::size_t pairs = layout.all_rows() * static_cast<std::size_t>(options.topk);
    ScratchPlan plan;
    const std::size_t counts = plan.take(static_cast<std::size_t>(ranks()) * sizeof(std::int32_t));
    local_ids_ = plan.take(pairs * sizeof(std::int32_t));
    weights_ = plan.take(pairs * sizeof(float));
    const std::size_t zeros = plan.take(layout.record_bytes());
    const std::size_t sums = plan.take(layout.record_bytes() * grid_.x * (threads_a_cta / 32));
    allocate_scratch(plan);
    parameters_.counts = at<std::int32_t>(counts);
    parameters_.routing = {options.topk, at<std::int32_t>(local_ids_), at<float>(weights_)};
    parameters_.zeros = at<std::byte>(zeros);
    parameters_.sums = at<std::byte>(sums);
    const cuda::DeviceScope scope(device());
    for (int rank = 0; rank < local_ranks(); ++rank)
      cuda::check(cudaMemset(at<std::byte>(zeros, rank), 0, layout.record_bytes()), "zeroing of a record");
  }

  Arrived arrived(int local) const override {
    const GatherLayout& layout = parameters_.layout;
    Arrived arrived;
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    arrived.rows = workspace_.view(gpu_).at<std::byte>(rank_of(local), layout.record(0));
    arrived.row_stride = layout.record_bytes();
    arrived.room = ranks() * call_.max_tokens;
    arrived.received = -1;
    arrived.real = -1;
    arrived.local_ids = at<std::int32_t>(local_ids_, local);
    arrived.weights = at<float>(weights_, local);
    return arrived;
  }

  bf16* result_rows(int local) const override {
    if (options_.combine_wire != Wire::bf16) return nullptr;
    return workspace_.view(gpu_).at<bf16>(rank_of(local), parameters_.layout.partial(0));
  }

 private:
  std::size_t local_ids_ = 0, weights_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_gather(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                     const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  return std::make_unique<DeviceGather>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
