#include "exchange/cuda_counters.cuh"
#include "exchange/gather/cuda_call.hpp"

namespace heddle {

namespace {

/// Where this rank's rows begin, and how many there are in all.
struct Span {
  int first = 0;
  int rows = 0;
};

template <RowMover mover>
__device__ Span span_of(const DeviceWorker<mover>& w, const GatherCall& call, const std::int32_t* counts) {
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
template <RowMover mover>
__device__ bool send(DeviceWorker<mover>& w, const GatherCall& call, const SendInput& input, std::int32_t* counts) {
  if (!check_input(w, call, input)) return false;
  const std::int32_t* heard = counts;
  if (call.mode != GatherMode::padded) heard = gather_exchange_counts(w, call.layout, input.tokens, counts);
  if (heard == nullptr) return false;
  // No row travels, but ranks have met: none offers its next sums while another one still pulls the last ones.
  if (call.mode == GatherMode::tensor_parallel) return true;
  const Span span = span_of(w, call, heard);
  if (call.mode == GatherMode::zero_filled) {
    std::byte* sum = of_this_rank(call.sums, call) + static_cast<std::size_t>(w.index()) * call.layout.record_bytes();
    return gather_all_reduce(w, call.layout, static_cast<std::size_t>(span.rows), static_cast<std::size_t>(span.first), input,
                             of_this_rank(call.zeros, call), sum);
  }
  return gather_send(w, call.layout, static_cast<std::size_t>(span.first), input);
}

/// Tensor-parallel attention: the tokens are here; only their ids become local.
template <RowMover mover>
__device__ void take_own_tokens(DeviceWorker<mover>& w, const GatherCall& call, const ArrivedRouting& routing,
                                const PairCount& count) {
  const SendInput input = send_input(call);
  const RowFormat& wire = call.layout.wire;
  std::byte* rows = of_this_rank(call.own_rows, call);
  const int bits = w.part_bits(input.tokens, wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const auto token = static_cast<std::size_t>(row_of(item, bits));
    const auto to = [&](int) { return rows + token * wire.row_bytes(); };
    send_row(w, 1, to, input.hidden + token * static_cast<std::size_t>(wire.hidden), wire, part_of(item, bits));
  }
  const int rank = w.heap().rank;
  w.spread(call.max_tokens, call.topk, [&](int token, int choice) {
    const int pair = token * call.topk + choice;
    const bool there = token < input.tokens;
    const std::int32_t local = there ? call.placement.local_id(input.ids[pair], rank) : -1;
    routing.local_ids[pair] = local;
    routing.weights[pair] = there ? input.weights[pair] : 0.0f;
    count(local);
  });
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) gather_dispatch(const __grid_constant__ GatherCall call) {
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  std::int32_t* counts = of_this_rank(call.counts, call);
  if (call.send && !send(w, call, send_input(call), counts)) return;
  if (!call.receive || !w.begin()) return;
  const ArrivedRouting routing{call.topk, of_this_rank(call.routing.local_ids, call), of_this_rank(call.routing.weights, call)};
  PairCount pairs(w, call);
  if (call.mode == GatherMode::tensor_parallel) {
    take_own_tokens(w, call, routing, pairs);
    pairs.add_up();
    const auto none = [](int) { return 0; };
    return tally_dispatch(call, none, none, none);
  }
  // Where rows are summed the sending half has heard all there is to hear, and left the counts a kernel or a meeting ago.
  const std::int32_t* heard = call.mode == GatherMode::zero_filled ? counts : gather_hear(w, call.layout, counts);
  if (heard == nullptr) return;
  const Span span = span_of(w, call, heard);
  const auto padding = [&](int row) {
    return call.mode == GatherMode::padded ? row % call.max_tokens >= heard[row / call.max_tokens] : row >= span.rows;
  };
  gather_list(w, call.layout, w.heap().ranks * call.max_tokens, call.placement, routing, padding, pairs);
  pairs.add_up();
  const int tokens = send_input(call).tokens;
  tally_dispatch(
      call, [&](int d) { return w.live(d) ? tokens : 0; }, [&](int s) { return w.live(s) ? heard[s] : 0; }, [](int) { return 0; });
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) gather_combine(const __grid_constant__ GatherCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  Span span;
  BatchSlice own{0, send_input(call).tokens};
  bf16* out = rank.output.out;
  SharedRows shared = shared_rows(call);
  if (call.mode == GatherMode::tensor_parallel) {
    // Each rank sums a slice of the batch; the all-gather behind this kernel makes it an all-reduce.
    own = slice_of(w, own.rows);
    span = {own.first, send_input(call).tokens};
    out = of_this_rank(call.slices, call);
    if (shared.rows != nullptr)
      shared.rows += static_cast<std::size_t>(own.first) * static_cast<std::size_t>(call.layout.wire.hidden);
    if (shared.factors != nullptr) shared.factors += own.first;
  } else {
    span = span_of(w, call, of_this_rank(call.counts, call));
  }
  if (call.send && !gather_offer(w, call.layout, span.rows, rank.results)) return;
  if (!call.receive) return;
  if (gather_pull(w, call.layout, static_cast<std::size_t>(span.first), own.rows, shared, out)) tally_combine(call);
}

class DeviceGather final : public DeviceWay<GatherCall> {
 public:
  DeviceGather(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
               const DeviceExchangeOptions& device_options)
      : DeviceWay(workspace, gpu, options, memory, device_options,
                  {gather_dispatch<RowMover::any>, gather_dispatch<RowMover::plain>, gather_dispatch<RowMover::bulk>},
                  {gather_combine<RowMover::any>, gather_combine<RowMover::plain>, gather_combine<RowMover::bulk>}) {
    parameters_.layout = make_layout<GatherLayout>(options, areas());
    parameters_.tagged = tagged_of(options, memory, ranks());
    parameters_.mode = options.gather;
    if (options.tagged_tokens > 0) {
      prepare(tagged_gather_dispatch());
      prepare(tagged_gather_combine());
    }
    const GatherLayout& layout = parameters_.layout;
    const std::size_t pairs = layout.all_rows() * static_cast<std::size_t>(options.topk);
    ScratchPlan plan;
    const std::size_t counts = plan.take(static_cast<std::size_t>(ranks()) * sizeof(std::int32_t));
    local_ids_ = plan.take(pairs * sizeof(std::int32_t));
    weights_ = plan.take(pairs * sizeof(float));
    const std::size_t zeros = plan.take(layout.record_bytes());
    const std::size_t sums = plan.take(layout.record_bytes() * grid_.x * (threads_a_cta / 32));
    const std::size_t batch = tensor_parallel() ? layout.all_rows() : 0;
    own_rows_ = plan.take(batch * layout.wire.row_bytes());
    const std::size_t slices = plan.take(batch * static_cast<std::size_t>(options.hidden) * sizeof(bf16));
    allocate_scratch(plan);
    parameters_.counts = at<std::int32_t>(counts);
    parameters_.routing = {options.topk, at<std::int32_t>(local_ids_), at<float>(weights_)};
    parameters_.zeros = at<std::byte>(zeros);
    parameters_.sums = at<std::byte>(sums);
    parameters_.own_rows = at<std::byte>(own_rows_);
    parameters_.slices = at<bf16>(slices);
    if (tensor_parallel()) all_gather_.slices = parameters_.slices;
    const cuda::DeviceScope scope(device());
    for (int rank = 0; rank < local_ranks(); ++rank)
      cuda::check(cudaMemset(at<std::byte>(zeros, rank), 0, layout.record_bytes()), "zeroing of a record");
  }

  Arrived arrived(int local) const override {
    const GatherLayout& layout = parameters_.layout;
    Arrived arrived;
    arrived.layout = ArrivedLayout::routed;
    arrived.wire = options_.wire;
    if (tensor_parallel()) {
      arrived.rows = at<std::byte>(own_rows_, local);
      arrived.row_stride = layout.wire.row_bytes();
      arrived.room = call_.max_tokens;
    } else {
      arrived.rows = workspace_.view(gpu_).at<std::byte>(rank_of(local), layout.record(0));
      arrived.row_stride = layout.record_bytes();
      arrived.room = ranks() * call_.max_tokens;
    }
    arrived.received = -1;
    arrived.real = -1;
    arrived.local_ids = at<std::int32_t>(local_ids_, local);
    arrived.weights = at<float>(weights_, local);
    return arrived;
  }

  const void* dispatch_kernel() const override { return are_tagged() ? tagged_gather_dispatch() : DeviceWay::dispatch_kernel(); }
  const void* combine_kernel() const override { return are_tagged() ? tagged_gather_combine() : DeviceWay::combine_kernel(); }

  bf16* result_rows(int local) const override {
    if (options_.combine_wire != Wire::bf16) return nullptr;
    return workspace_.view(gpu_).at<bf16>(rank_of(local), parameters_.layout.partial(0));
  }

 private:
  /// Do the rows of the call at hand travel as words?
  bool are_tagged() const { return parameters_.tagged.takes(call_.max_tokens); }

  std::size_t local_ids_ = 0, weights_ = 0, own_rows_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_gather(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                     const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  return std::make_unique<DeviceGather>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
