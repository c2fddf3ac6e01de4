#include "exchange/cuda_counters.cuh"
#include "exchange/elastic/protocol.hpp"

namespace heddle {

namespace {

struct ElasticCall : DeviceCall {
  ElasticLayout layout;
  ElasticScratch scratch;  ///< all pointers below: of the first local rank
  ExpertLayout experts_layout;
  std::int32_t* places = nullptr;
  std::byte* rows = nullptr;  ///< arrival order
  bf16* sums = nullptr;
  int room = 0;
  bool by_expert = true;
  bool weighted = false;
};

__device__ ElasticScratch scratch_of(const ElasticCall& call) {
  ElasticScratch scratch = call.scratch;
  scratch.sent = of_this_rank(scratch.sent, call);
  scratch.arrived = of_this_rank(scratch.arrived, call);
  scratch.home_tokens = of_this_rank(scratch.home_tokens, call);
  scratch.routing.local_ids = of_this_rank(scratch.routing.local_ids, call);
  scratch.routing.weights = of_this_rank(scratch.routing.weights, call);
  return scratch;
}

__device__ ExpertLayout experts_of(const ElasticCall& call, int rank) {
  ExpertLayout to = call.experts_layout;
  to.local_experts = call.placement.experts_on[rank];
  to.begins = of_this_rank(to.begins, call);
  to.counts = of_this_rank(to.counts, call);
  to.places = of_this_rank(call.places, call);
  to.row_weights = of_this_rank(to.row_weights, call);
  to.rows = of_this_rank(to.rows, call);
  to.numbers = of_this_rank(to.numbers, call);
  to.before = of_this_rank(to.before, call);
  return to;
}

template <bool plain>
__global__ void __launch_bounds__(threads_a_cta, 1) elastic_dispatch(const __grid_constant__ ElasticCall call) {
  HEDDLE_DEVICE_WORKER(w, call, call.send ? CallPart::dispatch_send : CallPart::dispatch_receive);
  const ElasticScratch scratch = scratch_of(call);
  if (call.send) {
    const SendInput input = send_input(call);
    if (!check_input(w, call, input) || !elastic_send(w, call.layout, input, call.placement, scratch)) return;
  }
  if (!call.receive) return;
  const std::int32_t* arrived = elastic_receive(w, call.layout, scratch);
  if (arrived == nullptr) return;
  const int n = w.sum_values(w.heap().ranks, arrived);
  if (!elastic_list(w, call.layout, arrived, n, call.by_expert ? n : call.room, call.placement, scratch)) return;
  if (call.by_expert) {
    if (!elastic_expand(w, call.layout, arrived, n, call.placement, scratch, experts_of(call, w.heap().rank))) return;
  } else {
    elastic_copy_out(w, call.layout, arrived, n, of_this_rank(call.rows, call));
  }
  const std::int32_t* rows = of_this_rank(call.experts_layout.counts, call);
  tally_dispatch(
      call, [&](int d) { return scratch.sent.totals[d]; }, [&](int s) { return arrived[s]; }, [&](int e) { return rows[e]; });
}

template <bool plain>
__global__ void __launch_bounds__(threads_a_cta, 1) elastic_combine(const __grid_constant__ ElasticCall call) {
  HEDDLE_DEVICE_WORKER(w, call, CallPart::combine);
  const ElasticScratch scratch = scratch_of(call);
  const DeviceRank& rank = call.ranks[blockIdx.y];
  if (call.send) {
    ElasticResults results;
    results.rows = rank.results;
    results.weighted = call.weighted;
    results.summed = !call.by_expert;
    if (call.by_expert) {
      results.places = of_this_rank(call.places, call);
      results.sums = of_this_rank(call.sums, call);
    }
    if (!elastic_return(w, call.layout, results, scratch)) return;
  }
  if (!call.receive) return;
  if (elastic_collect(w, call.layout, send_input(call), call.placement, scratch, call.weighted, shared_rows(call), rank.output.out))
    tally_combine(call);
}

class DeviceElastic final : public DeviceWay<ElasticCall> {
 public:
  DeviceElastic(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options, const ExchangeMemory& memory,
                const DeviceExchangeOptions& device_options)
      : DeviceWay(workspace, gpu, options, memory, device_options, {elastic_dispatch<false>, elastic_dispatch<true>},
                  {elastic_combine<false>, elastic_combine<true>}) {
    if (options.cpu_sync) throw InputError("elastic with cpu_sync is not on GPUs yet; the host engine has it");
    parameters_.layout = make_layout<ElasticLayout>(options, areas());
    parameters_.layout.reduce = options.reduce;
    parameters_.by_expert = options.arrived != ArrivedLayout::routed;
    parameters_.weighted = options.weight_at == WeightAt::combine;
    parameters_.room = static_cast<int>(parameters_.layout.region_rows());
    plan_scratch();
  }

  Arrived arrived(int local) const override {
    Arrived arrived;
    arrived.layout = options_.arrived;
    arrived.wire = options_.wire;
    arrived.row_stride = parameters_.layout.wire.row_bytes();
    arrived.rows = at<std::byte>(rows_, local);
    arrived.received = -1;
    arrived.real = -1;
    if (parameters_.by_expert) {
      arrived.room = static_cast<int>(room_);
      arrived.begins = at<std::int32_t>(begins_, local);
      arrived.counts = at<std::int32_t>(counts_, local);
      arrived.row_weights = at<float>(row_weights_, local);
      arrived.block_rows = parameters_.experts_layout.block_rows;
      return arrived;
    }
    arrived.room = parameters_.room;
    arrived.local_ids = at<std::int32_t>(local_ids_, local);
    arrived.weights = at<float>(weights_, local);
    arrived.slots_wanted = options_.reduce == Reduce::home;
    return arrived;
  }

 private:
  void plan_scratch() {
    const auto r = static_cast<std::size_t>(ranks());
    const auto k = static_cast<std::size_t>(options_.topk);
    const std::size_t arrivals = parameters_.layout.region_rows();
    const auto local = static_cast<std::size_t>(std::max(1, parameters_.layout.shape.max_local_experts));
    room_ = parameters_.by_expert ? expanded_room(options_, static_cast<int>(local), arrivals) : arrivals;
    ScratchPlan plan;
    const NumberingPlan sent = plan_numbering(plan, static_cast<std::size_t>(options_.cap) * r, r, options_.cap, set_chunk);
    const std::size_t arrived_counts = plan.take(r * sizeof(std::int32_t));
    const std::size_t home_tokens = plan.take(arrivals * sizeof(std::int32_t));
    local_ids_ = plan.take(arrivals * k * sizeof(std::int32_t));
    weights_ = plan.take(arrivals * k * sizeof(float));
    const std::size_t places = plan.take(arrivals * k * sizeof(std::int32_t));
    begins_ = plan.take(local * sizeof(std::int32_t));
    counts_ = plan.take(local * sizeof(std::int32_t));
    row_weights_ = plan.take(room_ * sizeof(float));
    rows_ = plan.take(room_ * parameters_.layout.wire.row_bytes());
    const bool sums_wanted = parameters_.by_expert && options_.reduce == Reduce::rank && options_.combine_wire != Wire::bf16;
    const std::size_t sums = plan.take(sums_wanted ? arrivals * static_cast<std::size_t>(options_.hidden) * sizeof(bf16) : 0);
    const std::size_t numbers = plan.take(arrivals * k * sizeof(std::int32_t));
    const std::size_t before = plan.take(chunks_of(static_cast<int>(arrivals * k), kind_chunk) * local * sizeof(std::int32_t));
    allocate_scratch(plan);
    parameters_.experts_layout.numbers = at<std::int32_t>(numbers);
    parameters_.experts_layout.before = at<std::int32_t>(before);
    ElasticScratch& scratch = parameters_.scratch;
    scratch.sent = at(sent);
    scratch.arrived = at<std::int32_t>(arrived_counts);
    scratch.home_tokens = at<std::int32_t>(home_tokens);
    scratch.routing = {options_.topk, at<std::int32_t>(local_ids_), at<float>(weights_)};
    parameters_.places = at<std::int32_t>(places);
    parameters_.rows = at<std::byte>(rows_);
    parameters_.sums = at<bf16>(sums);
    ExpertLayout& to = parameters_.experts_layout;
    to.block_rows = options_.arrived == ArrivedLayout::masked ? ranks() * options_.cap : 0;
    to.begins = at<std::int32_t>(begins_);
    to.counts = at<std::int32_t>(counts_);
    to.row_weights = at<float>(row_weights_);
    to.rows = at<std::byte>(rows_);
  }

  std::size_t room_ = 0, local_ids_ = 0, weights_ = 0, begins_ = 0, counts_ = 0, row_weights_ = 0, rows_ = 0;
};

}  // namespace

std::unique_ptr<DeviceExchange> create_device_elastic(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                      const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  return std::make_unique<DeviceElastic>(workspace, gpu, options, memory, device);
}

}  // namespace heddle
