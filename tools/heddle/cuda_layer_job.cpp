#include "cuda_layer_job.hpp"

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "exchange/cuda_exchange.hpp"
#include "group/agreement.hpp"
#include "group/cuda_workspace.hpp"
#include "heddle/device_layer.hpp"
#include "layer/expert_bytes.hpp"
#include "layer/expert_slices.hpp"
#include "layer/options.hpp"
#include "layer/row_counts.hpp"
#include "mega/schedule.hpp"
#include "trace/cuda_arena.hpp"

namespace heddle::tool {

namespace {

using cuda::check;

/// A rank's tokens and outputs: where they are in the batch, and in its GPU's memory.
struct RankMemory {
  LayerInput batch;
  DeviceArray<int> tokens;
  DeviceArray<bf16> hidden, out;
  DeviceArray<std::int32_t> ids;
  DeviceArray<float> weights;

  DeviceInput input() const { return {tokens.data(), hidden.data(), ids.data(), weights.data(), {}}; }
};

template <class T>
DeviceArray<T> upload(int device, const T* from, std::size_t size) {
  DeviceArray<T> to(device, size);
  check(cudaMemcpy(to.data(), from, size * sizeof(T), cudaMemcpyHostToDevice), "copying to the GPU");
  return to;
}

/// What a rank of the layer brings: the whole batch under tensor-parallel attention.
LayerInput batch_of(const Job& job, int rank) {
  const Inputs& inputs = job.inputs;
  const bool all = job.options.tensor_parallel;
  const auto first = all ? std::size_t{0} : static_cast<std::size_t>(job.firsts[static_cast<std::size_t>(rank)]);
  const auto topk = static_cast<std::size_t>(inputs.routing.topk);
  LayerInput batch;
  batch.tokens = all ? inputs.tokens() : inputs.tokens_per_rank[static_cast<std::size_t>(rank)];
  batch.hidden = inputs.hidden_states.data() + first * static_cast<std::size_t>(inputs.source.shape.hidden);
  batch.ids = inputs.routing.ids.data() + first * topk;
  batch.weights = inputs.routing.weights.data() + first * topk;
  return batch;
}

/// The part of it that the rank's exchange takes: a slice where a way other than gather serves tensor-parallel attention.
ExchangeInput exchanged(const Job& job, const ExchangeOptions& exchange, int rank) {
  const LayerInput batch = batch_of(job, rank);
  if (!job.options.tensor_parallel || exchange.gather == GatherMode::tensor_parallel)
    return {batch.tokens, batch.hidden, batch.ids, batch.weights, {}};
  const int first = slice_begin(batch.tokens, rank, job.inputs.ranks);
  const int end = slice_begin(batch.tokens, rank + 1, job.inputs.ranks);
  return {end - first, nullptr, batch.ids + static_cast<std::ptrdiff_t>(first) * job.inputs.routing.topk, nullptr, {}};
}

/// What each of several nodes on one GPU may use: beside them there is room for what copies between them.
int sms_of_a_node(int device, int nodes) {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
  return std::max(1, (sms - nodes) / nodes);
}

/// The layers of one GPU's ranks.
class GpuLayers {
 public:
  GpuLayers(const Job& job, DeviceWorkspace& workspace, std::size_t gpu, const ExchangeMemory& memory)
      : job_(job), device_(workspace.device(gpu)), first_rank_(workspace.first_rank(gpu)) {
    const cuda::DeviceScope scope(device_);
    for (int local = 0; local < workspace.ranks_on(gpu); ++local) {
      weights_.push_back(LayerWeights::load(job.inputs.source, job.placement, first_rank_ + local));
      ranks_.push_back(bring(first_rank_ + local));
    }
    DeviceLayerOptions device;
    device.timed = true;
    if (job.inputs.nodes > 1) device.exchange.sms = sms_of_a_node(device_, job.inputs.nodes);
    try {
      layer_ = std::make_unique<DeviceLayer>(workspace, gpu, memory, weights_, job.options, device);
    } catch (const InputError& error) {
      const bool fused = job.options.way == Way::mega;
      throw InputError(std::string(error.what()) + (fused ? " (--engine host computes the fused layer on the host)"
                                                          : " (--experts-engine host computes experts on the host)"));
    }
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaDeviceSynchronize(), "copies of inputs");
  }
  ~GpuLayers() {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  GpuLayers(const GpuLayers&) = delete;

  /// From now on launches leave their time stamps.
  void start_recording() { arena_ = std::make_unique<trace::Arena>(device_); }
  void leave_recording(trace::Recorder& to) const { arena_->collect(to); }

  void begin(const Step& step) {
    const trace::Recording recording(arena_.get());
    std::vector<DeviceInput> inputs;
    for (const RankMemory& rank : ranks_) inputs.push_back(rank.input());
    layer_->begin(inputs, step, stream_);
  }
  void end() {
    const trace::Recording recording(arena_.get());
    std::vector<bf16*> outputs;
    for (const RankMemory& rank : ranks_) outputs.push_back(rank.out.data());
    layer_->end(outputs, stream_);
  }
  void wait() {
    check(cudaStreamSynchronize(stream_), "the layer");
    layer_->throw_if_failed();
  }
  const ExchangeOptions& exchange_options() const { return layer_->exchange_options(); }
  int passes() const { return layer_->passes(); }
  WayChoice explain(const Step& step) const { return layer_->explain(step); }
  /// Outputs into the job's, and what is to be said of the ranks.
  void leave(const RowCounts& counts, const std::vector<bool>& live);

 private:
  RankMemory bring(int rank) const;
  LayerReport report_of(int local, const RowCounts& counts, const std::vector<bool>& live) const;
  std::vector<int> pairs_of_experts(int rank, std::size_t experts) const;

  const Job& job_;
  int device_;
  int first_rank_;
  std::vector<LayerWeights> weights_;
  std::vector<RankMemory> ranks_;
  std::unique_ptr<DeviceLayer> layer_;
  DeviceStream stream_ = nullptr;
  std::unique_ptr<trace::Arena> arena_;  ///< null: nothing is recorded
};

RankMemory GpuLayers::bring(int rank) const {
  RankMemory memory;
  memory.batch = batch_of(job_, rank);
  const auto tokens = static_cast<std::size_t>(memory.batch.tokens);
  const std::size_t values = tokens * static_cast<std::size_t>(job_.inputs.source.shape.hidden);
  const std::size_t pairs = tokens * static_cast<std::size_t>(job_.inputs.routing.topk);
  memory.tokens = upload(device_, &memory.batch.tokens, 1);
  memory.hidden = upload(device_, memory.batch.hidden, values);
  memory.ids = upload(device_, memory.batch.ids, pairs);
  memory.weights = upload(device_, memory.batch.weights, pairs);
  memory.out = DeviceArray<bf16>(device_, values);
  return memory;
}

/// Pairs of the whole batch with each expert of this rank.
std::vector<int> GpuLayers::pairs_of_experts(int rank, std::size_t experts) const {
  std::vector<int> pairs(experts);
  for (const std::int32_t id : job_.inputs.routing.ids) {
    if (id < 0 || (job_.placement.rank_of(id) != rank && !job_.placement.is_everywhere())) continue;
    ++pairs[static_cast<std::size_t>(job_.placement.local_index(id))];
  }
  return pairs;
}

/// Rows of all row blocks that the fused layer cuts them into.
std::uint64_t rows_of_blocks(const std::vector<int>& pairs, int block_rows) {
  int blocks = 0;
  for (const int rows : pairs) blocks += parts_of(rows, block_rows);
  return static_cast<std::uint64_t>(blocks) * static_cast<std::uint64_t>(block_rows);
}

LayerReport GpuLayers::report_of(int local, const RowCounts& counts, const std::vector<bool>& live) const {
  const int rank = first_rank_ + local;
  const Arrived arrived = layer_->exchange().arrived(local);
  const DeviceLayerSeconds seconds = layer_->seconds();
  LayerReport report;
  report.way = layer_->way();
  report.passes = layer_->passes();
  report.layout = layer_->exchange_options().arrived;
  report.host_waited = arrived.host_waited;
  report.dispatch.seconds = seconds.dispatch;
  report.combine.seconds = seconds.combine;
  report.experts_seconds = seconds.experts;
  report.shared_seconds = seconds.shared;
  const auto add = [](PhaseReport& phase, const ExchangeTraffic& traffic) {
    phase.remote_bytes = traffic.remote_bytes;
    phase.local_bytes = traffic.local_bytes;
    phase.between_bytes = traffic.between_bytes;
  };
  add(report.dispatch, counts.dispatched(rank, live));
  add(report.combine, counts.combined(rank, live, job_.options.tensor_parallel && job_.inputs.tokens() > 0));
  report.rows_sent = counts.sent(rank, live);
  report.rows_received = static_cast<std::uint64_t>(counts.received(rank, live));
  const LayerWeights& weights = weights_[static_cast<std::size_t>(local)];
  const std::vector<int> pairs = pairs_of_experts(rank, weights.experts.size());
  const bool fused = layer_->way() == Way::mega;
  report.rows_room =
      fused ? rows_of_blocks(pairs, layer_->exchange_options().mega.block_rows) : static_cast<std::uint64_t>(arrived.room);
  std::vector<bool> touched;
  for (const int rows : pairs) {
    touched.push_back(rows > 0);
    report.rows_real += static_cast<std::uint64_t>(rows);
  }
  int intermediate = weights.shape.intermediate;
  if (job_.options.expert_slices) intermediate = slice_of_rank(intermediate, rank, job_.inputs.ranks).count;
  add_expert_bytes(report, weights, expert_options(weights, job_.options), intermediate, touched);
  if (fused) fuse_activation_bytes(report, intermediate);
  return report;
}

void GpuLayers::leave(const RowCounts& counts, const std::vector<bool>& live) {
  const auto hidden = static_cast<std::size_t>(job_.inputs.source.shape.hidden);
  const bool all = job_.options.tensor_parallel;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const int rank = first_rank_ + static_cast<int>(i);
    RankOutcome& outcome = job_.outcomes[rank];
    outcome.report = report_of(static_cast<int>(i), counts, live);
    const DeviceLayerSeconds seconds = layer_->seconds();
    outcome.seconds = seconds.dispatch + seconds.experts + seconds.combine;
    if (!all || rank == 0) {  // under tensor-parallel attention every rank has all outputs
      const auto first = all ? std::size_t{0} : static_cast<std::size_t>(job_.firsts[static_cast<std::size_t>(rank)]);
      const std::size_t values = static_cast<std::size_t>(ranks_[i].batch.tokens) * hidden;
      check(cudaMemcpy(job_.output + first * hidden, ranks_[i].out.data(), values * sizeof(bf16), cudaMemcpyDeviceToHost),
            "copying of outputs");
    }
    outcome.state = RankOutcome::State::done;
  }
}

/// Kernels of the exchange in one call on a GPU; the fused layer is one.
std::uint64_t exchange_kernels(const ExchangeOptions& exchange, const LayerOptions& options, int nodes) {
  constexpr std::uint64_t nodes_kernels = 5, kernels_a_swap = 2;  // send, receive, return, hear, collect; heads, and bytes
  if (nodes > 1) return nodes_kernels + 2 * kernels_a_swap;
  std::uint64_t kernels = exchange.way == Way::mega ? 3 : 2;           // mega: announcement, the fused kernel, sums
  if (exchange.way == Way::normal) kernels = 3;                        // counts, rows, combine
  if (exchange.way == Way::elastic && exchange.cpu_sync) kernels = 4;  // sending, hearing, laying out, combine
  return kernels + (options.tensor_parallel ? 1 : 0);                  // the all-gather of outputs
}

}  // namespace

void run_device_layers(const Job& job, DeviceWorkspace& workspace, const ExchangeMemory& memory, Group& everybody) {
  std::vector<std::unique_ptr<GpuLayers>> gpus;
  step_together(everybody, "creation of the layers", [&] {
    for (std::size_t gpu = 0; gpu < workspace.gpus(); ++gpu)
      gpus.push_back(std::make_unique<GpuLayers>(job, workspace, gpu, memory));
  });
  everybody.barrier("start of the layer");
  const Step step{job.options.tensor_parallel ? job.inputs.tokens() : job.most_tokens, Phase::decode};
  const auto call = [&] {
    for (const auto& gpu : gpus) gpu->begin(step);
    for (const auto& gpu : gpus) gpu->end();
    for (const auto& gpu : gpus) gpu->wait();
  };
  for (int i = 0; i < job.trace.warm_calls; ++i) call();
  trace::Recorder* recorder = job.trace.recorder;
  for (const auto& gpu : gpus) {
    if (recorder != nullptr) gpu->start_recording();
  }
  call();
  for (const auto& gpu : gpus) {
    if (recorder != nullptr) gpu->leave_recording(*recorder);
  }

  const ExchangeOptions& exchange = gpus.front()->exchange_options();
  RowCounts counts(exchange, job.inputs.nodes);
  for (int rank = 0; rank < job.inputs.ranks; ++rank) counts.count(rank, exchanged(job, exchange, rank));
  for (const auto& gpu : gpus) gpu->leave(counts, workspace.live());
  RankOutcome& first = job.outcomes[workspace.first_rank(0)];
  first.kernels =
      gpus.size() * static_cast<std::uint64_t>(gpus.front()->passes()) * exchange_kernels(exchange, job.options, job.inputs.nodes);
  if (job.options.way == Way::automatic) note_choice(first, gpus.front()->explain(step));
  for (std::size_t gpu = 0; gpu < workspace.gpus(); ++gpu) {
    for (int local = 0; local < workspace.ranks_on(gpu); ++local)
      job.outcomes[workspace.first_rank(gpu) + local].heap_bytes = workspace.bytes();
  }
}

}  // namespace heddle::tool
