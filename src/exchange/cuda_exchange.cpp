#include "exchange/cuda_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace heddle {

using cuda::check;

DeviceExchangeBase::DeviceExchangeBase(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                       const ExchangeMemory& memory, const DeviceExchangeOptions& device_options)
    : workspace_(workspace), gpu_(gpu), options_(options), memory_(memory) {
  if (options.placement.ranks() != ranks()) {
    throw InputError(fmt::format("the placement is for {} ranks, the group has {}", options.placement.ranks(), ranks()));
  }
  if (local_ranks() > max_local_ranks)
    throw InputError(fmt::format("{} ranks on GPU {}; at most {} share one", local_ranks(), device(), max_local_ranks));
  const ExchangeMemory own = exchange_memory(options);
  if (areas().end > workspace.bytes() || own.dispatch > memory.dispatch || own.combine > memory.combine ||
      own.outputs > memory.outputs || own.max_local_experts > memory.max_local_experts) {
    throw InputError(fmt::format("way {} needs a workspace of {} bytes a rank, this one has {}", name(options.way), areas().end,
                                 workspace.bytes()));
  }
  const cuda::DeviceScope scope(device());
  const auto experts = static_cast<std::size_t>(options.placement.experts());
  std::vector<int> map(options.placement.rank_map().begin(), options.placement.rank_map().end());
  map.insert(map.end(), options.placement.local_index_map().begin(), options.placement.local_index_map().end());
  for (int r = 0; r < ranks(); ++r) map.push_back(static_cast<int>(options.placement.experts_of(r).size()));
  placement_ = DeviceArray<int>(device(), map.size());
  check(cudaMemcpy(placement_.data(), map.data(), map.size() * sizeof(int), cudaMemcpyHostToDevice), "copying of the placement");
  team_counters_ = DeviceArray<Word>(device(), static_cast<std::size_t>(local_ranks()));
  call_.team = workspace.impl().team(gpu, team_counters_.share());
  call_.placement = {placement_.data(), placement_.data() + experts, placement_.data() + 2 * experts};
  call_.experts = options.placement.experts();
  call_.topk = options.topk;
  call_.staging_bytes = align_up(std::max(wire_format(options).row_bytes(), returned_format(options).row_bytes()), 128);
  if (options.wire == Wire::bf16 && options.combine_wire == Wire::bf16) call_.staging_bytes = 0;
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device()), "number of SMs");
  const int wanted = device_options.sms > 0 ? device_options.sms : sms;
  grid_ = dim3(static_cast<unsigned>(std::max(1, std::min(wanted, sms) / local_ranks())), static_cast<unsigned>(local_ranks()));
}

void DeviceExchangeBase::take_inputs(std::span<const DeviceInput> inputs, const Step& step) {
  workspace_.throw_if_aborted();
  const int most =
      options_.way == Way::gather && options_.gather == GatherMode::tensor_parallel ? ranks() * options_.cap : options_.cap;
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
}

void DeviceExchangeBase::take_results(std::span<const bf16* const> results) {
  if (results.size() != static_cast<std::size_t>(local_ranks())) {
    throw InputError(fmt::format("{} results for the {} ranks of GPU {}", results.size(), local_ranks(), device()));
  }
  for (std::size_t i = 0; i < results.size(); ++i) call_.ranks[i].results = results[i];
}

void DeviceExchangeBase::take_outputs(std::span<const DeviceOutput> outputs) {
  if (outputs.size() != static_cast<std::size_t>(local_ranks())) {
    throw InputError(fmt::format("{} outputs for the {} ranks of GPU {}", outputs.size(), local_ranks(), device()));
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) call_.ranks[i].output = outputs[i];
}

void DeviceExchangeBase::allocate_scratch(const ScratchPlan& plan) {
  call_.scratch_stride = align_up(plan.bytes(), 128);
  scratch_ = DeviceArray<std::byte>(device(), call_.scratch_stride * static_cast<std::size_t>(local_ranks()));
}

void DeviceExchangeBase::prepare(const void* kernel) {
  const cuda::DeviceScope scope(device());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes())),
        "shared memory of a kernel");
  int ctas_an_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_an_sm, kernel, threads_a_cta, shared_bytes()), "occupancy of a kernel");
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device()), "number of SMs");
  const int room = ctas_an_sm * sms;
  if (room < static_cast<int>(grid_.y)) {
    throw InputError(fmt::format("GPU {} holds {} CTAs of way {} at once, {} ranks need at least one each", device(), room,
                                 name(options_.way), grid_.y));
  }
  grid_.x = std::min(grid_.x, static_cast<unsigned>(room) / grid_.y);
}

void DeviceExchangeBase::launch(const void* kernel, const void* parameters, bool send, bool receive, DeviceStream stream) {
  // The parameters begin with a DeviceCall in every way.
  auto* call = static_cast<DeviceCall*>(const_cast<void*>(parameters));
  *call = call_;
  call->send = send;
  call->receive = receive;
  const cuda::DeviceScope scope(device());
  cudaLaunchConfig_t config{};
  config.gridDim = grid_;
  config.blockDim = dim3(threads_a_cta);
  config.dynamicSmemBytes = shared_bytes();
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<void*>(parameters)};
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launch of an exchange kernel");
}

std::unique_ptr<DeviceExchange> create_device_exchange(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeOptions& options,
                                                       const ExchangeMemory& memory, const DeviceExchangeOptions& device) {
  check_options(options);
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
      break;
  }
  throw InputError("unknown way");
}

}  // namespace heddle
