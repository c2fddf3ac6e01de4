// A call on one GPU: dispatch, the experts of each local rank, combine; the shared expert beside them.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "exchange/cuda_exchange.hpp"
#include "heddle/device_layer.hpp"
#include "layer/cuda_rank_experts.hpp"
#include "layer/cuda_shared_expert.hpp"
#include "layer/options.hpp"
#include "mega/sm90/cuda_mega.hpp"
#include "signal/fault.hpp"
#include "trace/cuda_arena.hpp"

namespace heddle {

namespace {

ExchangeOptions checked_options(const DeviceWorkspace& workspace, std::size_t gpu, std::span<const LayerWeights> weights,
                                const LayerOptions& options) {
  const auto ranks = static_cast<std::size_t>(workspace.ranks_on(gpu));
  if (weights.size() != ranks) {
    throw InputError(fmt::format("weights of {} ranks for the {} ranks of GPU {}", weights.size(), ranks, workspace.device(gpu)));
  }
  for (std::size_t i = 0; i < ranks; ++i) {
    const int rank = workspace.first_rank(gpu) + static_cast<int>(i);
    const std::size_t experts = weights[i].placement.experts_of(rank).size();
    if (weights[i].experts.size() == experts) continue;
    throw InputError(fmt::format("rank {} is given {} experts, its placement says {}", rank, weights[i].experts.size(), experts));
  }
  return exchange_options(weights.front(), options);
}

}  // namespace

struct DeviceLayer::Impl {
  Impl(DeviceWorkspace& of, std::size_t number, const ExchangeMemory& memory, std::span<const LayerWeights> weights,
       const LayerOptions& layer_options, const DeviceLayerOptions& device_options);

  void begin(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream);
  void end(std::span<bf16* const> outputs, DeviceStream stream);
  std::vector<DeviceInput> own_slices(std::span<const DeviceInput> inputs, DeviceStream stream);
  std::vector<const bf16*> run_experts(DeviceStream stream);
  void run_fused(std::span<bf16* const> outputs, DeviceStream stream);
  std::vector<DeviceOutput> places_of(std::span<bf16* const> outputs) const;
  void give_up(DeviceStream stream);
  void mark(const DeviceEvent& event, DeviceStream stream) const {
    if (timed) event.record(stream);
  }

  int device() const { return workspace.device(gpu); }
  int local_ranks() const { return workspace.ranks_on(gpu); }
  std::size_t locals() const { return static_cast<std::size_t>(local_ranks()); }
  int rank_of(int local) const { return workspace.first_rank(gpu) + local; }
  /// Where a rank's slice of this call's batch begins.
  int first_token(int rank) const { return slice_begin(batch.max_tokens, rank, workspace.ranks()); }
  bf16* slice_outputs(int local) const {
    return slice_out.data() + static_cast<std::size_t>(local) * static_cast<std::size_t>(settings.cap) * hidden;
  }

  DeviceWorkspace& workspace;
  std::size_t gpu;
  ExchangeOptions settings;
  std::size_t hidden;
  int topk;
  bool host_waits;    ///< for counts, in the receiving half of dispatch
  bool gathers;       ///< gather under tensor-parallel attention: every rank has the whole batch
  bool slices_batch;  ///< tensor-parallel attention by another way: each rank keeps its slice of the batch
  bool wants_times;
  bool timed = false;  ///< this call
  Step batch;          ///< of this call, as given
  Step step;           ///< of its exchange
  std::unique_ptr<DeviceExchange> exchange;
  DeviceMega* fused = nullptr;       ///< the exchange, where it is the whole layer
  std::vector<RankExperts> experts;  ///< a local rank, of the chain
  std::unique_ptr<SharedExpertStream> shared;
  DeviceArray<int> slice_tokens;   ///< [local ranks]
  DeviceArray<bf16> slice_out;     ///< [local ranks, cap, H]
  std::vector<DeviceEvent> marks;  ///< before dispatch, experts and combine, and behind it
};

DeviceLayer::Impl::Impl(DeviceWorkspace& of, std::size_t number, const ExchangeMemory& memory,
                        std::span<const LayerWeights> weights, const LayerOptions& options,
                        const DeviceLayerOptions& device_options)
    : workspace(of),
      gpu(number),
      settings(checked_options(of, number, weights, options)),
      hidden(static_cast<std::size_t>(settings.hidden)),
      topk(settings.topk),
      host_waits(settings.way == Way::normal || (settings.way == Way::elastic && settings.cpu_sync)),
      gathers(settings.way == Way::gather && settings.gather == GatherMode::tensor_parallel),
      slices_batch(options.tensor_parallel && !gathers),
      wants_times(device_options.timed) {
  const cuda::DeviceScope scope(device());
  prepare_layer_kernels();
  if (settings.way == Way::mega) {
    auto mega = std::make_unique<DeviceMega>(workspace, gpu, settings, memory, device_options, weights, options);
    fused = mega.get();
    exchange = std::move(mega);
  } else {
    exchange = create_device_exchange(workspace, gpu, settings, memory, device_options.exchange);
  }
  experts.reserve(weights.size());
  for (int local = 0; fused == nullptr && local < local_ranks(); ++local) {
    const bool in_place = exchange->result_rows(local) != nullptr;  // then run() is given the same
    experts.emplace_back(device(), rank_of(local), weights[static_cast<std::size_t>(local)], options, settings, in_place,
                         device_options);
  }
  const LayerWeights& first = weights.front();
  if (first.shared && (fused == nullptr || shared_place(first, options, device_options) == SharedPlace::module)) {
    const int most_tokens = room_of(settings, 1).own_tokens;
    shared = std::make_unique<SharedExpertStream>(device(), first, options, local_ranks(), most_tokens, device_options);
  }
  const auto locals = static_cast<std::size_t>(local_ranks());
  if (slices_batch) {
    slice_tokens = DeviceArray<int>(device(), locals);
    slice_out = DeviceArray<bf16>(device(), locals * static_cast<std::size_t>(settings.cap) * hidden);
  }
  for (int i = 0; i < 4; ++i) marks.emplace_back(true);
}

std::vector<DeviceInput> DeviceLayer::Impl::own_slices(std::span<const DeviceInput> inputs, DeviceStream stream) {
  static_assert(NumbersCall::most >= max_local_ranks);
  NumbersCall numbers;
  numbers.to = slice_tokens.data();
  numbers.count = local_ranks();
  std::vector<DeviceInput> own(inputs.begin(), inputs.end());
  for (std::size_t i = 0; i < own.size(); ++i) {
    const int rank = rank_of(static_cast<int>(i));
    const auto first = static_cast<std::size_t>(first_token(rank));
    numbers.values[i] = first_token(rank + 1) - first_token(rank);
    own[i].tokens = slice_tokens.data() + i;
    if (batch.max_tokens == 0) continue;  // there may be no arrays
    own[i].hidden += first * hidden;
    own[i].ids += first * static_cast<std::size_t>(topk);
    own[i].weights += first * static_cast<std::size_t>(topk);
  }
  launch_numbers(numbers, stream);
  return own;
}

void DeviceLayer::Impl::begin(std::span<const DeviceInput> inputs, const Step& given, DeviceStream stream) {
  if (inputs.size() != locals())
    throw InputError(fmt::format("{} inputs for the {} ranks of GPU {}", inputs.size(), locals(), device()));
  const cuda::DeviceScope scope(device());
  batch = given;
  step = given;
  timed = wants_times && !is_captured(stream);
  mark(marks[0], stream);
  std::vector<DeviceInput> own(inputs.begin(), inputs.end());
  if (slices_batch) {
    step.max_tokens = longest_slice(given.max_tokens, workspace.ranks(), settings.cap);
    own = own_slices(inputs, stream);
  }
  if (shared != nullptr) shared->fork(stream);
  trace::name_launches("dispatch");
  // First, so that it finds free SMs: its peers wait for it.
  if (host_waits) {
    exchange->dispatch_send(own, step, stream);
  } else {
    exchange->dispatch(own, step, stream);
  }
  if (shared == nullptr) return;
  trace::name_launches("shared gemm1", "shared gemm2", rank_of(0));
  try {
    shared->run(own, step.max_tokens, timed);
  } catch (...) {
    give_up(stream);
    throw;
  }
}

std::vector<const bf16*> DeviceLayer::Impl::run_experts(DeviceStream stream) {
  const long long tokens = gathers ? step.max_tokens : static_cast<long long>(workspace.ranks()) * step.max_tokens;
  const int expected = std::max(1, static_cast<int>(tokens * topk / settings.placement.experts()));
  std::vector<const bf16*> results;
  for (int local = 0; local < local_ranks(); ++local) {
    RankExperts& mine = experts[static_cast<std::size_t>(local)];
    if (!workspace.live()[static_cast<std::size_t>(rank_of(local))]) {
      results.push_back(exchange->result_rows(local));  // masked: what lies there is of an earlier call, and nobody reads it
      continue;
    }
    trace::name_launches("gemm1", "gemm2", rank_of(local));
    results.push_back(mine.run(exchange->arrived(local), exchange->result_rows(local), expected, stream));
  }
  return results;
}

std::vector<DeviceOutput> DeviceLayer::Impl::places_of(std::span<bf16* const> outputs) const {
  std::vector<DeviceOutput> places(outputs.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    const int local = static_cast<int>(i);
    DeviceOutput& place = places[i];
    if (shared != nullptr) shared->add_to(place, local);
    if (gathers) {
      place.all_out = outputs[i];
    } else if (slices_batch) {
      place.out = slice_outputs(local);
      place.all_out = batch.max_tokens > 0 ? outputs[i] : nullptr;
      place.first = first_token(rank_of(local));
      place.all_tokens = batch.max_tokens;
    } else {
      place.out = outputs[i];
    }
  }
  return places;
}

/// Its time is that of the experts. It sums a shared expert of its own last, so another one has to be there.
void DeviceLayer::Impl::run_fused(std::span<bf16* const> outputs, DeviceStream stream) {
  if (shared != nullptr) shared->join(stream);
  mark(marks[1], stream);
  fused->run(places_of(outputs), stream);
  mark(marks[2], stream);
  fused->share(stream);
}

void DeviceLayer::Impl::end(std::span<bf16* const> outputs, DeviceStream stream) {
  if (outputs.size() != locals())
    throw InputError(fmt::format("{} outputs for the {} ranks of GPU {}", outputs.size(), locals(), device()));
  const cuda::DeviceScope scope(device());
  trace::name_launches("dispatch");
  if (host_waits) exchange->dispatch_receive(stream);
  try {
    if (fused != nullptr) {
      run_fused(outputs, stream);
    } else {
      mark(marks[1], stream);
      const std::vector<const bf16*> results = run_experts(stream);
      mark(marks[2], stream);
      if (shared != nullptr) shared->join(stream);
      trace::name_launches("combine");
      exchange->combine(results, places_of(outputs), stream);
    }
  } catch (...) {
    give_up(stream);
    throw;
  }
  mark(marks[3], stream);
}

/// Nobody shall wait for this GPU's results.
void DeviceLayer::Impl::give_up(DeviceStream stream) {
  try {
    if (is_captured(stream)) return;  // nobody waits while a graph is made
    for (int local = 0; local < local_ranks(); ++local) {
      workspace.impl().give_up(rank_of(local), {{WordKind::failed, -1, -1}, rank_of(local), 0, 0});
    }
  } catch (const Error&) {
    // A GPU that does not even run this kernel: the others' deadlines tell them.
  }
}

DeviceLayer::DeviceLayer(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeMemory& memory,
                         std::span<const LayerWeights> weights, const LayerOptions& options, const DeviceLayerOptions& device)
    : impl_(std::make_unique<Impl>(workspace, gpu, memory, weights, options, device)) {}
DeviceLayer::~DeviceLayer() = default;
DeviceLayer::DeviceLayer(DeviceLayer&&) noexcept = default;
DeviceLayer& DeviceLayer::operator=(DeviceLayer&&) noexcept = default;

void DeviceLayer::begin(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) {
  impl_->begin(inputs, step, stream);
}
void DeviceLayer::end(std::span<bf16* const> outputs, DeviceStream stream) { impl_->end(outputs, stream); }

void DeviceLayer::throw_if_failed() {
  std::exception_ptr first;
  const auto look = [&first](auto&& at) {
    try {
      at();
    } catch (const Error&) {
      if (first == nullptr) first = std::current_exception();
    }
  };
  // The exchange first: what experts met in a call that was given up follows from it. All are asked, so that none remembers.
  look([this] { impl_->workspace.throw_if_aborted(); });
  for (RankExperts& mine : impl_->experts) look([&mine] { mine.throw_if_failed(); });
  if (impl_->shared != nullptr) look([this] { impl_->shared->throw_if_failed(); });
  if (first != nullptr) std::rethrow_exception(first);
}

DeviceLayerSeconds DeviceLayer::seconds() const {
  if (!impl_->timed) throw InputError("the last call was not timed: it was captured, or DeviceLayerOptions::timed is off");
  const std::vector<DeviceEvent>& marks = impl_->marks;
  DeviceLayerSeconds seconds;
  seconds.dispatch = marks[0].seconds_until(marks[1]);
  seconds.experts = marks[1].seconds_until(marks[2]);
  seconds.combine = marks[2].seconds_until(marks[3]);
  if (impl_->shared != nullptr) seconds.shared = impl_->shared->seconds();
  return seconds;
}

const ExchangeOptions& DeviceLayer::exchange_options() const { return impl_->settings; }
const DeviceExchange& DeviceLayer::exchange() const { return *impl_->exchange; }

std::size_t DeviceLayer::weight_bytes() const {
  std::size_t bytes = impl_->shared != nullptr ? impl_->shared->weight_bytes() : 0;
  if (impl_->fused != nullptr) bytes += impl_->fused->weight_bytes();
  for (const RankExperts& mine : impl_->experts) bytes += mine.weight_bytes();
  return bytes;
}

std::size_t DeviceLayer::buffer_bytes() const {
  std::size_t bytes = impl_->shared != nullptr ? impl_->shared->buffer_bytes() : 0;
  for (const RankExperts& mine : impl_->experts) bytes += mine.buffer_bytes();
  if (!impl_->slices_batch) return bytes;
  const auto rows = static_cast<std::size_t>(impl_->local_ranks()) * static_cast<std::size_t>(impl_->settings.cap);
  return bytes + rows * impl_->hidden * sizeof(bf16);
}

}  // namespace heddle
