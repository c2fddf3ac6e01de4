#include "exchange/elastic/cuda_call.cuh"
#include "exchange/nodes/cuda_nodes.hpp"

namespace heddle {

namespace {

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) elastic_dispatch(const __grid_constant__ ElasticCall call) {
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  const ElasticScratch scratch = scratch_of(call);
  if (call.send) {
    const SendInput input = send_input(call);
    if (!check_input(w, call, input) || !elastic_send(w, call.layout, input, call.placement, scratch)) return;
  }
  if (!call.receive) return;
  const std::int32_t* arrived = elastic_receive(w, call.layout, scratch);
  if (arrived != nullptr) lay_out(w, call, scratch, arrived);
}

// With cpu_sync the receiving half is two kernels, and between them the host makes room for what the first one heard.
template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) elastic_hear(const __grid_constant__ ElasticCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::dispatch_receive);
  elastic_receive(w, call.layout, scratch_of(call));
}
template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) elastic_lay_out(const __grid_constant__ ElasticCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::dispatch_receive);
  const ElasticScratch scratch = scratch_of(call);
  lay_out(w, call, scratch, scratch.arrived);
}

template <RowMover mover>
__global__ void __launch_bounds__(threads_a_cta, 1) elastic_combine(const __grid_constant__ ElasticCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const ElasticScratch scratch = scratch_of(call);
  if (call.send && !elastic_return(w, call.layout, results_of(call), scratch)) return;
  if (!call.receive) return;
  if (elastic_collect(w, call.layout, send_input(call), call.placement, scratch, call.weighted, shared_rows(call),
                      call.ranks[blockIdx.y].output.out))
    tally_combine(call);
}

}  // namespace

DeviceElastic::DeviceElastic(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                             const ExchangeMemory& memory, const DeviceExchangeOptions& device_options)
    : DeviceWay(workspace, gpu, options, memory, device_options,
                {elastic_dispatch<RowMover::any>, elastic_dispatch<RowMover::plain>, elastic_dispatch<RowMover::bulk>},
                {elastic_combine<RowMover::any>, elastic_combine<RowMover::plain>, elastic_combine<RowMover::bulk>}) {
  parameters_.layout = make_layout<ElasticLayout>(options, areas());
  parameters_.layout.reduce = options.reduce;
  parameters_.by_expert = options.arrived != ArrivedLayout::routed;
  parameters_.weighted = options.weight_at == WeightAt::combine;
  parameters_.experts_layout.block_rows = options.arrived == ArrivedLayout::masked ? ranks() * options.cap : 0;
  const auto r = static_cast<std::size_t>(ranks());
  ScratchPlan plan;
  const NumberingPlan sent = plan_numbering(plan, static_cast<std::size_t>(options.cap) * r, r, options.cap, set_chunk);
  arrived_ = plan.take(r * sizeof(std::int32_t));
  allocate_scratch(plan);
  parameters_.scratch.sent = at(sent);
  parameters_.scratch.arrived = at<std::int32_t>(arrived_);
  if (options.cpu_sync) return;
  parameters_.room = parameters_.by_expert ? 0 : static_cast<int>(parameters_.layout.region_rows());
  make_room(parameters_.layout.region_rows());
}

Arrived DeviceElastic::arrived(int local) const {
  Arrived arrived;
  arrived.layout = options_.arrived;
  arrived.wire = options_.wire;
  arrived.row_stride = parameters_.layout.wire.row_bytes();
  arrived.received = -1;
  arrived.real = -1;
  if (parameters_.by_expert) {
    const ExpertLayout& to = parameters_.experts_layout;
    arrived.rows = of_rank(to.rows, local);
    arrived.room = static_cast<int>(expanded_room(options_, most_experts(), parameters_.layout.region_rows()));
    arrived.begins = of_rank(to.begins, local);
    arrived.counts = of_rank(to.counts, local);
    arrived.row_weights = of_rank(to.row_weights, local);
    arrived.block_rows = to.block_rows;
    return arrived;
  }
  arrived.rows = of_rank(parameters_.rows, local);
  arrived.room = parameters_.room;
  arrived.local_ids = of_rank(parameters_.scratch.routing.local_ids, local);
  arrived.weights = of_rank(parameters_.scratch.routing.weights, local);
  arrived.slots_wanted = options_.reduce == Reduce::home;
  return arrived;
}

void DeviceElastic::make_room(std::size_t rows) {
  const bool by_expert = parameters_.by_expert;
  const std::size_t row_bytes = parameters_.layout.wire.row_bytes();
  const auto experts = static_cast<std::size_t>(most_experts());
  const std::size_t pairs = rows * static_cast<std::size_t>(options_.topk);
  const std::size_t expanded = by_expert ? expanded_room(options_, most_experts(), rows) : 0;
  const bool sums_wanted = by_expert && options_.reduce == Reduce::rank && options_.combine_wire != Wire::bf16;
  ScratchPlan plan;
  const std::size_t home_tokens = plan.take(rows * sizeof(std::int32_t));
  const std::size_t local_ids = plan.take(pairs * sizeof(std::int32_t));
  const std::size_t weights = plan.take(pairs * sizeof(float));
  const std::size_t places = plan.take(pairs * sizeof(std::int32_t));
  const std::size_t numbers = plan.take(pairs * sizeof(std::int32_t));
  const std::size_t before = plan.take(chunks_of(static_cast<int>(pairs), kind_chunk) * experts * sizeof(std::int32_t));
  const std::size_t begins = plan.take(experts * sizeof(std::int32_t));
  const std::size_t counts = plan.take(experts * sizeof(std::int32_t));
  const std::size_t row_weights = plan.take(expanded * sizeof(float));
  const std::size_t out = plan.take((by_expert ? expanded : rows) * row_bytes);
  const std::size_t sums = plan.take(sums_wanted ? rows * static_cast<std::size_t>(options_.hidden) * sizeof(bf16) : 0);
  parameters_.arrivals_stride = align_up(plan.bytes(), 128);
  const std::size_t bytes = parameters_.arrivals_stride * static_cast<std::size_t>(local_ranks());
  if (arrivals_.data() == nullptr || bytes > arrivals_bytes_) {
    arrivals_ = {};
    arrivals_bytes_ = 0;
    arrivals_ = DeviceArray<std::byte>(device(), bytes);
    arrivals_bytes_ = bytes;
  }
  std::byte* base = arrivals_.data();
  const auto integers = [base](std::size_t offset) { return reinterpret_cast<std::int32_t*>(base + offset); };
  const auto floats = [base](std::size_t offset) { return reinterpret_cast<float*>(base + offset); };
  parameters_.scratch.home_tokens = integers(home_tokens);
  parameters_.scratch.routing = {options_.topk, integers(local_ids), floats(weights)};
  parameters_.rows = base + out;
  parameters_.sums = reinterpret_cast<bf16*>(base + sums);
  ExpertLayout& to = parameters_.experts_layout;
  to.places = integers(places);
  to.numbers = integers(numbers);
  to.before = integers(before);
  to.begins = integers(begins);
  to.counts = integers(counts);
  to.row_weights = floats(row_weights);
  to.rows = base + out;
}

namespace {

/// cpu_sync: the host waits for the counts and makes room for exactly what arrived.
class WaitingElastic final : public DeviceElastic {
 public:
  WaitingElastic(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                 const DeviceExchangeOptions& device_options)
      : DeviceElastic(workspace, gpu, options, memory, device_options),
        hear_(Kernels{elastic_hear<RowMover::any>, elastic_hear<RowMover::plain>, elastic_hear<RowMover::bulk>}.of(options.wire,
                                                                                                                   device_options)),
        lay_out_(Kernels{elastic_lay_out<RowMover::any>, elastic_lay_out<RowMover::plain>, elastic_lay_out<RowMover::bulk>}.of(
            options.wire, device_options)),
        received_(static_cast<std::size_t>(local_ranks()), 0) {
    prepare(hear_);
    prepare(lay_out_);
    make_room(0);
  }

  void dispatch_send(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    refuse_capture(stream, "way elastic with cpu_sync", "leave cpu_sync out");
    DeviceElastic::dispatch_send(inputs, step, stream);
  }
  void dispatch_receive(DeviceStream stream) override {
    refuse_capture(stream, "way elastic with cpu_sync", "leave cpu_sync out");
    launch(hear_, &parameters_, {false, true}, stream);
    received_ = wait_for_rows(arrived_, stream);
    make_room(static_cast<std::size_t>(*std::max_element(received_.begin(), received_.end())));
    launch(lay_out_, &parameters_, {false, true}, stream);
  }
  void dispatch(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) override {
    dispatch_send(inputs, step, stream);
    dispatch_receive(stream);
  }

  Arrived arrived(int local) const override {
    Arrived arrived = DeviceElastic::arrived(local);
    arrived.received = received_[static_cast<std::size_t>(local)];
    arrived.host_waited = true;
    arrived.room = arrived.received;
    if (parameters_.by_expert)
      arrived.room = static_cast<int>(expanded_room(options_, experts_of(local), static_cast<std::size_t>(arrived.received)));
    return arrived;
  }

 private:
  /// Rows that came to each local rank, by counts [ranks] in its scratch; none to masked ones, whose counts are old.
  std::vector<int> wait_for_rows(std::size_t counts_offset, DeviceStream stream) const {
    const auto r = static_cast<std::size_t>(ranks());
    std::vector<int> rows(received_.size(), 0);
    std::vector<std::int32_t> counts(r * rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      cuda::check(cudaMemcpyAsync(counts.data() + r * i, at<std::int32_t>(counts_offset, static_cast<int>(i)),
                                  r * sizeof(std::int32_t), cudaMemcpyDeviceToHost, stream),
                  "reading of counts");
    }
    cuda::check(cudaStreamSynchronize(stream), "waiting for counts");
    workspace_.throw_if_aborted();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!workspace_.live()[static_cast<std::size_t>(rank_of(static_cast<int>(i)))]) continue;
      for (std::size_t peer = 0; peer < r; ++peer) rows[i] += counts[r * i + peer];
    }
    return rows;
  }

  const void* hear_;
  const void* lay_out_;
  std::vector<int> received_;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_elastic(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                      const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  if (workspace.impl().map.nodes > 1) return create_device_elastic_nodes(workspace, gpu, options, memory, device);
  if (options.cpu_sync) return std::make_unique<WaitingElastic>(workspace, gpu, options, memory, device);
  return std::make_unique<DeviceElastic>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
