// normal on GPUs: the counts kernel, the host's wait for sizes, the moving kernel into memory of the exact
// size, and the combine kernel. It refuses stream capture by name, since the host must wait.
#include "exchange/cuda_counters.cuh"
#include "exchange/normal/protocol.hpp"

namespace heddle {

namespace {

struct NormalCall : DeviceCall {
  NormalLayout layout;
  NormalScratch scratch;                    ///< of the first local rank
  std::int32_t* firsts = nullptr;           ///< [ranks]
  std::int32_t* returned_firsts = nullptr;  ///< [ranks]
  std::byte* wire_rows = nullptr;           ///< [cap] quantised rows, unless the wire is bf16
  // Memory of the exact size, made once the host knows it.
  std::size_t exact_stride = 0;
  std::byte* rows = nullptr;
  ArrivedRouting routing;
  std::byte* returned = nullptr;
  ExpertLayout experts_layout;
  bf16* sums = nullptr;
  bool by_expert = true;
  bool weighted = false;
};

__device__ NormalScratch scratch_of(const NormalCall& call) {
  NormalScratch scratch = call.scratch;
  scratch.sent = of_this_rank(scratch.sent, call);
  scratch.arrived = of_this_rank(scratch.arrived, call);
  scratch.progress = of_this_rank(scratch.progress, call);
  scratch.tokens = of_this_rank(scratch.tokens, call);
  const bool plain = call.layout.wire.wire == Wire::bf16;
  scratch.rows_to_send =
      plain ? reinterpret_cast<const std::byte*>(call.ranks[blockIdx.y].input.hidden) : of_this_rank(call.wire_rows, call);
  return scratch;
}

__device__ ArrivedRouting routing_of(const NormalCall& call) {
  return {call.topk, of_this_rank(call.routing.local_ids, call.exact_stride),
          of_this_rank(call.routing.weights, call.exact_stride)};
}

__device__ ExpertLayout experts_of(const NormalCall& call, int rank) {
  ExpertLayout to = call.experts_layout;
  to.local_experts = call.placement.experts_on[rank];
  to.begins = of_this_rank(to.begins, call.exact_stride);
  to.counts = of_this_rank(to.counts, call.exact_stride);
  to.places = of_this_rank(to.places, call.exact_stride);
  to.row_weights = of_this_rank(to.row_weights, call.exact_stride);
  to.rows = of_this_rank(to.rows, call.exact_stride);
  to.numbers = of_this_rank(to.numbers, call.exact_stride);
  to.before = of_this_rank(to.before, call.exact_stride);
  return to;
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) normal_counts(const __grid_constant__ NormalCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::dispatch_send);
  const SendInput input = send_input(call);
  const NormalScratch scratch = scratch_of(call);
  if (!check_input(w, call, input)) return;
  for (int token = w.index(); call.layout.wire.wire != Wire::bf16 && token < input.tokens; token += w.count()) {
    const auto row = static_cast<std::size_t>(token);
    w.quantise_row(of_this_rank(call.wire_rows, call) + row * call.layout.wire.row_bytes(),
                   input.hidden + row * static_cast<std::size_t>(call.layout.wire.hidden), call.layout.wire);
  }
  if (!normal_exchange_counts(w, call.layout, input, call.placement, scratch)) return;
  if (w.index() != 0) return;
  std::int32_t* firsts = of_this_rank(call.firsts, call);
  std::int32_t* returned_firsts = of_this_rank(call.returned_firsts, call);
  w.lanes(w.heap().ranks, [&](int peer) {
    firsts[peer] = scratch.arrived[peer];
    returned_firsts[peer] = scratch.sent.totals[peer];
  });
  w.prefix_sums(w.heap().ranks, firsts, 1);
  w.prefix_sums(w.heap().ranks, returned_firsts, 1);
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) normal_move(const __grid_constant__ NormalCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::dispatch_receive);
  const NormalScratch scratch = scratch_of(call);
  std::byte* rows = of_this_rank(call.rows, call.exact_stride);
  const ArrivedRouting routing = routing_of(call);
  PairCount pairs(w, call);
  if (!normal_dispatch(w, call.layout, send_input(call), call.placement, scratch, of_this_rank(call.firsts, call), rows, routing,
                       pairs))
    return;
  pairs.add_up();
  w.count_rests();
  const ExpertLayout experts = experts_of(call, w.heap().rank);
  const auto tally = [&] {
    tally_dispatch(
        call, [&](int d) { return scratch.sent.totals[d]; }, [&](int s) { return scratch.arrived[s]; },
        [&](int e) { return experts.counts[e]; });
  };
  if (!call.by_expert) return tally();
  const int n = w.sum_values(w.heap().ranks, scratch.arrived);
  const auto bytes_of = [&](int i) { return rows + static_cast<std::size_t>(i) * call.layout.wire.row_bytes(); };
  const auto weights_of = [&](int i) { return routing.weights + static_cast<std::ptrdiff_t>(i) * call.topk; };
  if (expand_rows(w, n, call.topk, routing.local_ids, call.layout.wire, bytes_of, weights_of, experts)) tally();
}

/// sums [n, H]: what goes back of each arrived row.
template <RowMover mover>
__device__ bool sum_arrived_rows(DeviceWorker<mover>& w, const NormalCall& call, const NormalScratch& scratch, const bf16* results,
                                 bf16* sums) {
  const int hidden = call.layout.returned.hidden;
  const int n = w.sum_values(w.heap().ranks, scratch.arrived);
  const std::int32_t* places = of_this_rank(call.experts_layout.places, call.exact_stride);
  const ArrivedRouting routing = routing_of(call);
  const int bits = w.part_bits(n, hidden);
  for (int item = w.index(); item < n << bits; item += w.count()) {
    const int row = row_of(item, bits);
    sum_pairs(w, row, routing, places, results, hidden, call.weighted,
              sums + static_cast<std::size_t>(row) * static_cast<std::size_t>(hidden), part_of(item, bits));
  }
  return w.team_barrier();
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) normal_combine(const __grid_constant__ NormalCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const NormalScratch scratch = scratch_of(call);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  const std::int32_t* returned_firsts = of_this_rank(call.returned_firsts, call);
  std::byte* returned = of_this_rank(call.returned, call.exact_stride);
  if (call.send) {
    const bf16* sums = rank.results;
    if (call.by_expert) {
      bf16* sums_here = of_this_rank(call.sums, call.exact_stride);
      if (!sum_arrived_rows(w, call, scratch, rank.results, sums_here)) return;
      sums = sums_here;
    }
    if (!normal_return(w, call.layout, scratch, of_this_rank(call.firsts, call), sums, returned_firsts, returned)) return;
  }
  if (!call.receive) return;
  if (!normal_collect(w, call.layout, send_input(call), scratch, returned_firsts, returned, shared_rows(call), rank.output.out))
    return;
  w.count_rests();
  tally_combine(call);
}

class DeviceNormal final : public DeviceExchangeBase {
 public:
  DeviceNormal(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
               const DeviceExchangeOptions& device_options)
      : DeviceExchangeBase(workspace, gpu, options, memory, device_options),
        counts_(reinterpret_cast<const void*>(normal_counts<RowMover::any>)),
        move_(kernel_for(options.wire, normal_move<RowMover::any>, normal_move<RowMover::bulk>)),
        combine_(kernel_for(options.combine_wire, normal_combine<RowMover::any>, normal_combine<RowMover::bulk>)) {
    for (const void* kernel : {counts_, move_, combine_}) prepare(kernel);
    parameters_.layout = make_layout<NormalLayout>(options, areas());
    parameters_.layout.queue_rows = options.queue_rows;
    // As many flows as keep two rows each: one can be filled while the other is emptied.
    parameters_.layout.flows = std::clamp(options.queue_rows / 2, 1, most_flows);
    parameters_.layout.chunk_rows = std::min(options.chunk_rows, parameters_.layout.flow_rows());
    parameters_.by_expert = options.arrived != ArrivedLayout::routed;
    parameters_.weighted = options.weight_at == WeightAt::combine;
    const auto r = static_cast<std::size_t>(ranks());
    ScratchPlan plan;
    const NumberingPlan sent = plan_numbering(plan, static_cast<std::size_t>(options.cap) * r, r, options.cap, set_chunk);
    sent_ = sent.totals;
    arrived_ = plan.take(r * sizeof(std::int32_t));
    const std::size_t firsts = plan.take(r * sizeof(std::int32_t));
    const std::size_t returned_firsts = plan.take(r * sizeof(std::int32_t));
    const std::size_t progress = plan.take(r * static_cast<std::size_t>(parameters_.layout.flows) * sizeof(NormalProgress));
    const std::size_t tokens = plan.take(static_cast<std::size_t>(options.cap) * r * sizeof(std::int32_t));
    const std::size_t wire_rows = plan.take(static_cast<std::size_t>(options.cap) * parameters_.layout.wire.row_bytes());
    allocate_scratch(plan);
    parameters_.scratch.sent = at(sent);
    parameters_.scratch.arrived = at<std::int32_t>(arrived_);
    parameters_.scratch.progress = at<NormalProgress>(progress);
    parameters_.scratch.tokens = at<std::int32_t>(tokens);
    parameters_.firsts = at<std::int32_t>(firsts);
    parameters_.returned_firsts = at<std::int32_t>(returned_firsts);
    parameters_.wire_rows = at<std::byte>(wire_rows);
  }

  void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    refuse_capture(stream);
    take_inputs(inputs, step, stream);
    launch(counts_, &parameters_, {}, stream);
  }
  void dispatch_receive(DeviceStream stream) override {
    refuse_capture(stream);
    wait_for_counts(stream);
    make_exact_memory();
    launch(move_, &parameters_, {}, stream);
  }
  void combine_send(std::span<const bf16* const> results, DeviceStream stream) override {
    take_results(results, stream);
    launch(combine_, &parameters_, {true, false}, stream);
  }
  void combine_receive(std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    take_outputs(outputs, stream);
    launch(combine_, &parameters_, {false, true}, stream);
    share_outputs(stream);
  }
  void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    dispatch_send(inputs, step, stream);
    dispatch_receive(stream);
  }
  void combine(std::span<const bf16* const> results, std::span<const DeviceOutput> outputs, DeviceStream stream) override {
    take_results(results, stream);
    take_outputs(outputs, stream);
    launch(combine_, &parameters_, {}, stream);
    share_outputs(stream);
  }

  Arrived arrived(int local) const override {
    Arrived arrived;
    arrived.layout = options_.arrived;
    arrived.wire = options_.wire;
    arrived.row_stride = parameters_.layout.wire.row_bytes();
    arrived.received = received_[static_cast<std::size_t>(local)];
    arrived.real = -1;
    arrived.host_waited = true;
    const std::size_t shift = static_cast<std::size_t>(local) * parameters_.exact_stride;
    const auto moved = [shift](auto* first) {
      return reinterpret_cast<decltype(first)>(reinterpret_cast<std::uintptr_t>(first) + shift);
    };
    if (parameters_.by_expert) {
      const ExpertLayout& to = parameters_.experts_layout;
      arrived.rows = moved(to.rows);
      arrived.room = static_cast<int>(expanded_room(options_, experts_of(local), static_cast<std::size_t>(arrived.received)));
      arrived.begins = moved(to.begins);
      arrived.counts = moved(to.counts);
      arrived.row_weights = moved(to.row_weights);
      arrived.block_rows = to.block_rows;
      return arrived;
    }
    arrived.rows = moved(parameters_.rows);
    arrived.room = arrived.received;
    arrived.local_ids = moved(parameters_.routing.local_ids);
    arrived.weights = moved(parameters_.routing.weights);
    return arrived;
  }

 private:
  using DeviceExchangeBase::experts_of;
  static constexpr int most_flows = 128;  ///< with a peer, one a warp

  const void* kernel_for(Wire wire, void (*any)(NormalCall), void (*bulk)(NormalCall)) const {
    return reinterpret_cast<const void*>(wire == Wire::bf16 && call_.bulk_bytes > 0 ? bulk : any);
  }

  void wait_for_counts(DeviceStream stream) {
    const auto r = static_cast<std::size_t>(ranks());
    const auto locals = static_cast<std::size_t>(local_ranks());
    std::vector<std::int32_t> counts(2 * r * locals);
    for (std::size_t i = 0; i < locals; ++i) {
      const auto copy = [&](std::int32_t* to, std::size_t offset) {
        cuda::check(cudaMemcpyAsync(to, at<std::int32_t>(offset, static_cast<int>(i)), r * sizeof(std::int32_t),
                                    cudaMemcpyDeviceToHost, stream),
                    "reading of counts");
      };
      copy(counts.data() + 2 * r * i, sent_);
      copy(counts.data() + 2 * r * i + r, arrived_);
    }
    cuda::check(cudaStreamSynchronize(stream), "waiting for counts");
    workspace_.throw_if_aborted();
    received_.assign(locals, 0);
    most_received_ = most_returned_ = 0;
    for (std::size_t i = 0; i < locals; ++i) {
      if (!workspace_.live()[static_cast<std::size_t>(rank_of(static_cast<int>(i)))]) continue;  // its counts are of an old call
      std::size_t returned = 0;
      for (std::size_t peer = 0; peer < r; ++peer) {
        returned += static_cast<std::size_t>(counts[2 * r * i + peer]);
        received_[i] += counts[2 * r * i + r + peer];
      }
      most_received_ = std::max(most_received_, static_cast<std::size_t>(received_[i]));
      most_returned_ = std::max(most_returned_, returned);
    }
  }

  /// Only grows: freeing memory waits for all of this GPU's kernels, perhaps for those of others.
  void make_exact_memory() {
    const auto k = static_cast<std::size_t>(options_.topk);
    const std::size_t row_bytes = parameters_.layout.wire.row_bytes();
    const int local = std::max(1, parameters_.layout.shape.max_local_experts);
    const std::size_t expanded = parameters_.by_expert ? expanded_room(options_, local, most_received_) : 0;
    ScratchPlan plan;
    const std::size_t rows = plan.take(most_received_ * row_bytes);
    const std::size_t ids = plan.take(most_received_ * k * sizeof(std::int32_t));
    const std::size_t weights = plan.take(most_received_ * k * sizeof(float));
    const std::size_t returned = plan.take(most_returned_ * parameters_.layout.returned.row_bytes());
    const std::size_t begins = plan.take(static_cast<std::size_t>(local) * sizeof(std::int32_t));
    const std::size_t counts = plan.take(static_cast<std::size_t>(local) * sizeof(std::int32_t));
    const std::size_t places = plan.take(most_received_ * k * sizeof(std::int32_t));
    const std::size_t row_weights = plan.take(expanded * sizeof(float));
    const std::size_t expanded_rows = plan.take(expanded * row_bytes);
    const std::size_t sums =
        plan.take(parameters_.by_expert ? most_received_ * static_cast<std::size_t>(options_.hidden) * sizeof(bf16) : 0);
    const std::size_t numbers = plan.take(most_received_ * k * sizeof(std::int32_t));
    const std::size_t before = plan.take(chunks_of(static_cast<int>(most_received_ * k), kind_chunk) *
                                         static_cast<std::size_t>(local) * sizeof(std::int32_t));
    parameters_.exact_stride = align_up(plan.bytes(), 128);
    const std::size_t bytes = parameters_.exact_stride * static_cast<std::size_t>(local_ranks());
    if (bytes > exact_bytes_) {
      exact_ = DeviceArray<std::byte>(device(), bytes);
      exact_bytes_ = bytes;
    }
    std::byte* base = exact_.data();
    parameters_.rows = base + rows;
    parameters_.routing = {options_.topk, reinterpret_cast<std::int32_t*>(base + ids), reinterpret_cast<float*>(base + weights)};
    parameters_.returned = base + returned;
    ExpertLayout& to = parameters_.experts_layout;
    to.block_rows = options_.arrived == ArrivedLayout::masked ? ranks() * options_.cap : 0;
    to.begins = reinterpret_cast<std::int32_t*>(base + begins);
    to.counts = reinterpret_cast<std::int32_t*>(base + counts);
    to.places = reinterpret_cast<std::int32_t*>(base + places);
    to.row_weights = reinterpret_cast<float*>(base + row_weights);
    to.rows = base + expanded_rows;
    to.numbers = reinterpret_cast<std::int32_t*>(base + numbers);
    to.before = reinterpret_cast<std::int32_t*>(base + before);
    parameters_.sums = reinterpret_cast<bf16*>(base + sums);
  }

  static void refuse_capture(DeviceStream stream) {
    DeviceExchangeBase::refuse_capture(stream, "way normal", "take low_latency, elastic, one_sided or gather");
  }

  const void *counts_, *move_, *combine_;
  NormalCall parameters_;
  DeviceArray<std::byte> exact_;
  std::vector<int> received_;
  std::size_t most_received_ = 0, most_returned_ = 0, sent_ = 0, arrived_ = 0, exact_bytes_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_normal(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                     const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  return std::make_unique<DeviceNormal>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
