#include "exchange/cuda_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "exchange/gather/by_nccl.hpp"
#include "trace/cuda_arena.hpp"

namespace heddle {

DevicePlacement::DevicePlacement(int device, const Placement& placement, int ranks) {
  const auto experts = static_cast<std::size_t>(placement.experts());
  std::vector<int> map(placement.rank_map().begin(), placement.rank_map().end());
  map.insert(map.end(), placement.local_index_map().begin(), placement.local_index_map().end());
  for (int rank = 0; rank < ranks; ++rank) map.push_back(static_cast<int>(placement.experts_of(rank).size()));
  memory = DeviceArray<int>(device, map.size());
  const int* from = memory.data();
  cuda::check(cudaMemcpy(memory.data(), map.data(), map.size() * sizeof(int), cudaMemcpyHostToDevice), "copying of the placement");
  view = {from, from + experts, from + 2 * experts, placement.experts()};
}

using cuda::check;

namespace {

TallyPlan tally_plan(const ExchangeOptions& options) {
  TallyPlan plan;
  plan.ranks = options.placement.ranks();
  plan.sent_to_experts = options.way == Way::low_latency;
  plan.sent = plan.sent_to_experts ? options.placement.experts() : plan.ranks;
  plan.experts = options.placement.max_local_experts();
  plan.experts_by_combine = options.arrived == ArrivedLayout::routed;
  return plan;
}

}  // namespace

DeviceExchangeBase::DeviceExchangeBase(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                       const ExchangeMemory& memory, const DeviceExchangeOptions& device_options)
    : workspace_(workspace), gpu_(gpu), options_(options), memory_(memory) {
  if (options.placement.ranks() != ranks()) {
    throw InputError(fmt::format("the placement is for {} ranks, the group has {}", options.placement.ranks(), ranks()));
  }
  if (workspace.impl().map.nodes > 1 && options.way != Way::elastic) {
    throw InputError(fmt::format("way {} knows one node, the group has {}; take elastic, whose rows also go to other nodes",
                                 name(options.way), workspace.impl().map.nodes));
  }
  if (local_ranks() > max_local_ranks)
    throw InputError(fmt::format("{} ranks on GPU {}; at most {} share one", local_ranks(), device(), max_local_ranks));
  constexpr int most_cap = (1 << 24) - 1;  // an announced count has 24 bits
  if (options.cap > most_cap / ranks())
    throw InputError(
        fmt::format("the cap is {} rows, on GPUs at most {} are possible with {} ranks", options.cap, most_cap / ranks(), ranks()));
  const ExchangeMemory own = exchange_memory(options);
  if (areas().end > workspace.bytes() || own.dispatch > memory.dispatch || own.combine > memory.combine ||
      own.outputs > memory.outputs || own.mega_words > memory.mega_words || own.mega_sums > memory.mega_sums ||
      own.tagged_dispatch > memory.tagged_dispatch || own.tagged_combine > memory.tagged_combine) {
    throw InputError(fmt::format("way {} needs a workspace of {} bytes a rank, this one has {}", name(options.way), areas().end,
                                 workspace.bytes()));
  }
  if (options.topk > most_choices)
    throw InputError(fmt::format("top-k is {}; on GPUs at most {} is possible", options.topk, most_choices));
  const cuda::DeviceScope scope(device());
  placement_ = DevicePlacement(device(), options.placement, ranks());
  team_counters_ = DeviceArray<TeamCounters>(device(), static_cast<std::size_t>(local_ranks()));
  call_.team = workspace.impl().team(gpu, team_counters_.share());
  call_.placement = placement_.view;
  call_.experts = options.placement.experts();
  call_.topk = options.topk;
  call_.squad_bytes = squad_bytes;
  constexpr int most_bulk_bytes = std::numeric_limits<std::uint16_t>::max();
  if (device_options.bulk_bytes < 0 || device_options.bulk_bytes > most_bulk_bytes)
    throw InputError(fmt::format("bulk_bytes is {}; 0 is for no bulk copies, 1 to {} for rows of at least so many bytes",
                                 device_options.bulk_bytes, most_bulk_bytes));
  call_.bulk_bytes = static_cast<std::uint16_t>(device_options.bulk_bytes);
  shared_bytes_ = squad_bytes + (call_.bulk_bytes > 0 ? bulk_ring_bytes : 0);
  if (device_options.counters) make_counters();
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device()), "number of SMs");
  fixed_ctas_ = device_options.sms > 0;
  const int wanted = fixed_ctas_ ? device_options.sms : sms;
  const int ctas_a_rank = std::clamp(std::min(wanted, sms) / local_ranks(), 1, most_squads);
  grid_ = dim3(static_cast<unsigned>(ctas_a_rank), static_cast<unsigned>(local_ranks()));
  all_gather_.layout = {shape_of(options), options.hidden, areas()};
  prepare(all_gather());
}

void DeviceExchangeBase::make_counters() {
  tallies_ = std::make_unique<DeviceTallies>(device(), tally_plan(options_), local_ranks());
  const TallyPlan& plan = tallies_->plan();
  call_.team.tallies = tallies_->data();
  call_.tally_plan = plan;
  if (!plan.experts_by_combine) return;
  const auto words = static_cast<std::size_t>(local_ranks()) * static_cast<std::size_t>(plan.experts);
  routed_pairs_ = DeviceArray<Word>(device(), words);
  workspace_.impl().keep_zeroed(gpu_, routed_pairs_.share(), words * sizeof(Word));
  call_.routed_pairs = routed_pairs_.data();
}

bool is_captured(DeviceStream stream) {
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void DeviceExchangeBase::refuse_capture(DeviceStream stream, std::string_view what, std::string_view instead) {
  if (is_captured(stream))
    throw InputError(fmt::format("{} cannot be captured in a graph: its host waits for row counts; {}", what, instead));
}

ExchangeCounters DeviceExchangeBase::counters(int local_rank) const {
  if (tallies_ == nullptr) return DeviceExchange::counters(local_rank);
  if (local_rank < 0 || local_rank >= local_ranks()) {
    throw InputError(fmt::format("counters of local rank {}: GPU {} has {} ranks", local_rank, device(), local_ranks()));
  }
  return tallies_->read(local_rank, options_.placement, experts_of(local_rank));
}

void DeviceExchangeBase::take_inputs(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) {
  workspace_.throw_if_aborted();
  const int most = tensor_parallel() ? ranks() * options_.cap : options_.cap;
  if (step.max_tokens > most) {
    throw InputError(
        fmt::format("way {}: the step's largest batch is {} rows, the cap is {}; create the layer with a cap of at least {}",
                    name(options_.way), step.max_tokens, most, step.max_tokens));
  }
  if (inputs.size() != static_cast<std::size_t>(local_ranks())) {
    throw InputError(fmt::format("{} inputs for the {} ranks of GPU {}", inputs.size(), local_ranks(), device()));
  }
  call_.max_tokens = step.max_tokens;
  for (std::size_t i = 0; i < inputs.size(); ++i) call_.ranks[i].input = inputs[i];
  order_.dispatch(is_captured(stream));
}

void DeviceExchangeBase::take_results(std::span<const bf16* const> results, DeviceStream stream) {
  order_.need_dispatch(is_captured(stream), name(options_.way));
  if (results.size() != static_cast<std::size_t>(local_ranks())) {
    throw InputError(fmt::format("{} results for the {} ranks of GPU {}", results.size(), local_ranks(), device()));
  }
  for (std::size_t i = 0; i < results.size(); ++i) call_.ranks[i].results = results[i];
}

void DeviceExchangeBase::take_outputs(std::span<const DeviceOutput> outputs, DeviceStream stream) {
  const bool captured = is_captured(stream);
  order_.need_dispatch(captured, name(options_.way));
  if (outputs.size() != static_cast<std::size_t>(local_ranks())) {
    throw InputError(fmt::format("{} outputs for the {} ranks of GPU {}", outputs.size(), local_ranks(), device()));
  }
  check_shared(outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) call_.ranks[i].output = outputs[i];
  order_.combine(captured);
}

void DeviceExchangeBase::check_shared(std::span<const DeviceOutput> outputs) const {
  const int room = ranks() * options_.cap;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const DeviceOutput& output = outputs[i];
    const int rank = rank_of(static_cast<int>(i));
    if (tensor_parallel()) {
      if (output.all_out != nullptr) continue;
      throw InputError(fmt::format("rank {}: gather tensor_parallel leaves all outputs in all_out, which is null", rank));
    }
    if ((output.all_out == nullptr) != (outputs[0].all_out == nullptr))
      throw InputError(fmt::format("rank {} {} all outputs, rank {} {}; all ranks do or none", rank,
                                   output.all_out == nullptr ? "does not want" : "wants", rank_of(0),
                                   output.all_out == nullptr ? "does" : "does not"));
    if (output.all_out == nullptr) continue;
    if (output.first < 0 || output.first > output.all_tokens || output.all_tokens > room) {
      throw InputError(fmt::format("rank {}: tokens from row {} on do not fit a batch of {} rows (at most {}: {} ranks of {})",
                                   rank, output.first, output.all_tokens, room, ranks(), options_.cap));
    }
  }
}

void DeviceExchangeBase::share_outputs(DeviceStream stream) {
  if (call_.ranks[0].output.all_out != nullptr) launch(all_gather(), &all_gather_, {}, stream);
}

void DeviceExchangeBase::allocate_scratch(const ScratchPlan& plan) {
  call_.scratch_stride = align_up(plan.bytes(), 128);
  scratch_ = DeviceArray<std::byte>(device(), call_.scratch_stride * static_cast<std::size_t>(local_ranks()));
}

void DeviceExchangeBase::prepare(const void* kernel) {
  const cuda::DeviceScope scope(device());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_)),
        "shared memory of a kernel");
  int ctas_an_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_an_sm, kernel, threads_a_cta, shared_bytes_), "occupancy of a kernel");
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device()), "number of SMs");
  const int room = ctas_an_sm * sms;
  if (room < static_cast<int>(grid_.y)) {
    throw InputError(fmt::format("GPU {} holds {} CTAs of way {} at once, {} ranks need at least one each", device(), room,
                                 name(options_.way), grid_.y));
  }
  grid_.x = std::min(grid_.x, static_cast<unsigned>(room) / grid_.y);
  find_largest_cluster(kernel);
}

void DeviceExchangeBase::find_largest_cluster(const void* kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "large clusters of a kernel");
  for (; largest_cluster_ > 1; largest_cluster_ /= 2) {
    cudaLaunchAttribute attributes[3];
    const cudaLaunchConfig_t config = configuration({largest_cluster_, threads_a_cta, false, false}, attributes, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters >= local_ranks()) return;
    cudaGetLastError();
  }
}

DeviceExchangeBase::Shape DeviceExchangeBase::shape_for(int tokens, const Halves& halves) const {
  // Measured (docs/performance.md). Up to 16 tokens one cluster of 16 CTAs wins, launched early; up to 64 half of the SMs, but
  // for elastic, whose copies want all; and small batches have no work for more warps, and those that are there must meet.
  constexpr int cluster_tokens = 16;
  constexpr int half_tokens = 64;
  constexpr int few_tokens = 128;
  Shape shape;
  shape.ctas = grid_.x;
  if (!fixed_ctas_ && tokens <= cluster_tokens) {
    shape.ctas = std::min(largest_cluster_, grid_.x);
    shape.early = true;
  } else if (!fixed_ctas_ && tokens <= half_tokens && options_.way != Way::elastic) {
    shape.ctas = (grid_.x + 1) / 2;
  }
  shape.threads = tokens <= few_tokens ? threads_a_cta / 2 : threads_a_cta;
  // A cluster is resident as a whole, and CTAs that wait for no other one need not be.
  shape.cooperative = local_ranks() > 1 || !(halves.independent || is_cluster(shape.ctas));
  shape.early |= halves.early && !fixed_ctas_ && !shape.cooperative;
  return shape;
}

bool DeviceExchangeBase::is_cluster(unsigned ctas) const {
  // Of SMs that were set apart a cluster may not find enough in one place.
  return !fixed_ctas_ && ctas > 1 && ctas <= largest_cluster_ && (ctas & (ctas - 1)) == 0;
}

cudaLaunchConfig_t DeviceExchangeBase::configuration(const Shape& shape, cudaLaunchAttribute* attributes,
                                                     DeviceStream stream) const {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.ctas, grid_.y);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shared_bytes_;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (is_cluster(shape.ctas)) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.ctas;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  // The launch may overtake the end of the kernel before it: ours wait for that end before they look at anything. Never where
  // SMs were set apart: CTAs that only wait would sit on those of another context, which this one's peers may need.
  if (shape.early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

void DeviceExchangeBase::launch(const void* kernel, const void* parameters, Halves halves, DeviceStream stream) {
  // The parameters begin with a DeviceCall in every way.
  auto* call = static_cast<DeviceCall*>(const_cast<void*>(parameters));
  *call = call_;
  call->send = halves.send;
  call->receive = halves.receive;
  const cuda::DeviceScope scope(device());
  cudaLaunchAttribute attributes[3];
  const cudaLaunchConfig_t config = configuration(shape_for(call_.max_tokens, halves), attributes, stream);
  static_assert(trace::fits_cells(threads_a_cta));
  trace::record_launch(call->team,
                       {rank_of(0), local_ranks(), static_cast<int>(config.gridDim.x), static_cast<int>(config.blockDim.x)});
  void* arguments[] = {const_cast<void*>(parameters)};
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launch of an exchange kernel");
}

ExchangeCounters DeviceExchange::counters(int) const {
  throw InputError("this exchange counts nothing; create it with DeviceExchangeOptions::counters");
}

std::unique_ptr<DeviceExchange> create_device_exchange(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                       const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  check_options(options);
  if (device.nccl != nullptr && device.counters)
    throw InputError("counters with NCCL: its kernels count nothing; leave DeviceExchangeOptions::counters or nccl out");
  if (device.nccl != nullptr && device.bulk_bytes != 0)
    throw InputError("bulk copies with NCCL: its kernels move the rows; leave DeviceExchangeOptions::bulk_bytes or nccl out");
  if (device.nccl != nullptr && options.tagged_tokens != 0)
    throw InputError("tagged rows with NCCL: its kernels move the rows; leave ExchangeOptions::tagged_tokens or nccl out");
  if (device.nccl != nullptr) return create_device_gather_by_nccl(workspace, gpu, options, device);
  switch (options.way) {
    case Way::gather:
      return create_device_gather(workspace, gpu, options, memory, device);
    case Way::normal:
      return create_device_normal(workspace, gpu, options, memory, device);
    case Way::low_latency:
      return create_device_low_latency(workspace, gpu, options, memory, device);
    case Way::elastic:
      return create_device_elastic(workspace, gpu, options, memory, device);
    case Way::one_sided:
      return create_device_one_sided(workspace, gpu, options, memory, device);
    case Way::mega:
    case Way::automatic:  // refused by check_options
      break;
  }
  throw InputError("mega is a whole layer in one, not an exchange; create a DeviceLayer of that way");
}

}  // namespace heddle
