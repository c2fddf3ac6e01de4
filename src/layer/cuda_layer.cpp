// A layer on one GPU: a body for every way that a call may go, over the same weights; the choice among them, and the passes of a
// call.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "exchange/cuda_nccl.hpp"
#include "exchange/gather/by_nccl.hpp"
#include "group/cuda_workspace.hpp"
#include "layer/candidates.hpp"
#include "layer/cuda_body.hpp"
#include "layer/cuda_own_router.hpp"
#include "layer/layer_kernels.hpp"
#include "layer/options.hpp"
#include "layer/passes.hpp"
#include "layer/room.hpp"

namespace heddle {

namespace {

void check_weights_of_ranks(const DeviceWorkspace& workspace, std::size_t gpu, std::span<const LayerWeights> weights) {
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
}

/// Of way auto: gather is a candidate where NCCL, if it is to move its rows, can.
CandidateCheck check_of(const DeviceWorkspace& workspace, const DeviceLayerOptions& device) {
  return [&workspace, nccl = device.exchange.nccl](const ExchangeOptions& exchange) -> std::string {
    if (nccl == nullptr || exchange.way != Way::gather) return "";
    return refused_by_nccl(exchange, workspace.impl().map, nccl->impl().map);
  };
}

/// Without what only another way's kernels have, where a layer chooses among several.
DeviceLayerOptions options_for(const DeviceLayerOptions& device, Way way, bool chosen) {
  DeviceLayerOptions one = device;
  if (chosen && way != Way::gather) one.exchange.nccl = nullptr;
  if (chosen && (way == Way::mega || one.exchange.nccl != nullptr)) {  // neither counts nor copies in bulk
    one.exchange.counters = false;
    one.exchange.bulk_bytes = 0;
  }
  return one;
}

}  // namespace

struct DeviceLayer::Impl {
  Impl(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeMemory& memory, std::span<const LayerWeights> weights,
       const LayerOptions& layer_options, const DeviceLayerOptions& device_options);

  void begin(std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream);
  void end(std::span<bf16* const> outputs, DeviceStream stream);

  void make_parts(std::span<const LayerWeights> weights, const DeviceLayerOptions& device);
  void begin_pass(int pass, DeviceStream stream);
  void check_passes(DeviceStream stream) const;
  void begin_later_pass(int pass, DeviceStream stream);
  std::vector<DeviceInput> inputs_of(int pass, DeviceStream stream);
  std::vector<RefusedWay> not_now() const;
  const CallMarks* marks_of(int pass);
  MegaWeights loaded_weights() const;
  void check_local_rank(int local_rank) const {
    if (local_rank < 0 || local_rank >= parts.local_ranks())
      throw InputError(fmt::format("weights of local rank {}; GPU {} has {}", local_rank, parts.device(), parts.local_ranks()));
  }

  LayerOptions options;
  LayerParts parts;
  WayChooser chooser;
  std::vector<std::unique_ptr<DeviceBody>> bodies;  ///< a candidate
  DeviceBody* now = nullptr;                        ///< of the last call
  std::unique_ptr<OwnRouter> router;                ///< if the weights have one
  bool goes_by_nccl;                                ///< gather, if it is a candidate
  bool wants_times;
  bool timed = false;  ///< this call
  Step step;           ///< of this call
  Passes passes;
  std::vector<DeviceInput> inputs;
  DeviceArray<int> pass_tokens;  ///< [local ranks], of the pass under way
  std::vector<CallMarks> marks;  ///< a pass
};

DeviceLayer::Impl::Impl(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeMemory& memory,
                        std::span<const LayerWeights> weights, const LayerOptions& layer_options, const DeviceLayerOptions& device)
    : options(layer_options),
      parts{workspace, gpu, TokenSizes::of(weights.front().shape), layer_options.cap},
      chooser(weights.front(), layer_options,
              candidates_of(weights.front(), layer_options, Engine::gpus, check_of(workspace, device)),
              workspace.impl().map.model()),
      goes_by_nccl(device.exchange.nccl != nullptr),
      wants_times(device.timed) {
  const cuda::DeviceScope scope(parts.device());
  prepare_layer_kernels();
  const bool chosen = options.way == Way::automatic;
  // Chains first: the fused layer takes their weights.
  for (const LayerOptions& one : chooser.options()) {
    if (one.way == Way::mega) continue;
    bodies.push_back(std::make_unique<DeviceBody>(parts, one, memory, weights, options_for(device, one.way, chosen)));
  }
  if (weights.front().router) router = std::make_unique<OwnRouter>(parts, weights.front(), options);
  make_parts(weights, device);
  for (const LayerOptions& one : chooser.options()) {  // the last one, if there is one
    if (one.way != Way::mega) continue;
    const DeviceLayerOptions own = options_for(device, one.way, chosen);
    bodies.push_back(std::make_unique<DeviceBody>(parts, one, memory, weights, own, loaded_weights()));
    if (bodies.back()->wants_shared() && parts.shared == nullptr) {
      const int most_tokens = room_of(bodies.back()->settings(), 1).own_tokens;
      parts.shared =
          std::make_unique<SharedExpertStream>(parts.device(), weights.front(), options, parts.local_ranks(), most_tokens, device);
    }
  }
  if (options.overflow == Overflow::split) {
    pass_tokens = DeviceArray<int>(parts.device(), parts.locals());
    const bool waits = std::any_of(bodies.begin(), bodies.end(), [](const auto& body) { return body->host_waits(); });
    if (waits && workspace.gpus() > 1) {
      throw InputError(
          "overflow = split by a way whose host waits for counts: each pass would wait for the other GPUs of this process, which "
          "have not begun it; take a process a GPU, or another way");
    }
  }
  now = bodies.front().get();
  if (wants_times) marks.emplace_back();
}

/// What the chains share, for whichever needs most.
void DeviceLayer::Impl::make_parts(std::span<const LayerWeights> weights, const DeviceLayerOptions& device) {
  const int gpu = parts.device();
  std::vector<Chain> chains;
  int most_tokens = 0;
  for (const auto& body : bodies) {
    chains.push_back(body->chain());
    most_tokens = std::max(most_tokens, room_of(body->settings(), 1).own_tokens);
  }
  if (!chains.empty()) {
    parts.experts.reserve(weights.size());
    for (int local = 0; local < parts.local_ranks(); ++local)
      parts.experts.emplace_back(gpu, parts.rank_of(local), weights[static_cast<std::size_t>(local)], options, chains, device);
    if (weights.front().shared)
      parts.shared = std::make_unique<SharedExpertStream>(gpu, weights.front(), options, parts.local_ranks(), most_tokens, device);
  }
  if (!options.tensor_parallel) return;
  const bool only_gather = std::all_of(chooser.options().begin(), chooser.options().end(),
                                       [](const LayerOptions& one) { return one.way == Way::gather; });
  if (only_gather) return;
  parts.slice_tokens = DeviceArray<int>(gpu, parts.locals());
  parts.slice_out = DeviceArray<bf16>(gpu, parts.locals() * static_cast<std::size_t>(options.cap) * parts.sizes.hidden);
}

/// Nothing where there are no chains: the fused layer then loads its own.
MegaWeights DeviceLayer::Impl::loaded_weights() const {
  MegaWeights loaded;
  for (const RankExperts& mine : parts.experts) loaded.routed.push_back(mine.weights());
  if (parts.shared != nullptr) loaded.shared = parts.shared->weights();
  return loaded;
}

/// Candidates that cannot be called as long as ranks are masked.
std::vector<RefusedWay> DeviceLayer::Impl::not_now() const {
  if (!goes_by_nccl) return {};
  const std::string reason = refused_while_masked(parts.workspace.live());
  return reason.empty() ? std::vector<RefusedWay>() : std::vector<RefusedWay>{{Way::gather, reason}};
}

const CallMarks* DeviceLayer::Impl::marks_of(int pass) { return timed ? &marks[static_cast<std::size_t>(pass)] : nullptr; }

std::vector<DeviceInput> DeviceLayer::Impl::inputs_of(int pass, DeviceStream stream) {
  if (passes.count == 1) return inputs;
  static_assert(PassCall::most_ranks >= max_local_ranks);
  PassCall call;
  call.to = pass_tokens.data();
  call.count = parts.local_ranks();
  call.first = passes.first(pass);
  call.most = passes.size;
  call.last = passes.is_last(pass);
  std::vector<DeviceInput> own;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.tokens[i] = inputs[i].tokens;
    own.push_back(parts.sizes.from(inputs[i], call.first));
    own.back().tokens = pass_tokens.data() + i;
  }
  launch_pass(call, stream);
  return own;
}

void DeviceLayer::Impl::begin_pass(int pass, DeviceStream stream) {
  std::vector<DeviceInput> own = inputs_of(pass, stream);
  const Step of_pass = passes.step(pass, step);
  if (router != nullptr) router->choose(own, of_pass.max_tokens, stream);
  now->begin(own, of_pass, stream, marks_of(pass));
}

/// The passes of a GPU are queued one after the other before those of the process's next GPU, whose rows they wait for: a stream
/// takes about a thousand launches before the host has to wait, too.
void DeviceLayer::Impl::check_passes(DeviceStream stream) const {
  constexpr int most = 32;
  if (passes.count <= most || parts.workspace.gpus() == 1 || is_captured(stream)) return;
  throw InputError(
      fmt::format("a step of {} tokens in {} passes of {}: with {} GPUs in one process at most {} passes are taken "
                  "outside of a graph; take a larger cap, or a process a GPU",
                  step.max_tokens, passes.count, passes.size, parts.workspace.gpus(), most));
}

/// Ranks are in the call already: what fails here must not let them wait.
void DeviceLayer::Impl::begin_later_pass(int pass, DeviceStream stream) {
  try {
    begin_pass(pass, stream);
  } catch (...) {
    parts.give_up(stream);
    throw;
  }
}

void DeviceLayer::Impl::begin(std::span<const DeviceInput> given, const Step& given_step, DeviceStream stream) {
  if (given.size() != parts.locals())
    throw InputError(fmt::format("{} inputs for the {} ranks of GPU {}", given.size(), parts.locals(), parts.device()));
  const cuda::DeviceScope scope(parts.device());
  if (router == nullptr) refuse_missing_ids(given);
  step = given_step;
  passes = Passes::of(options, parts.workspace.ranks(), step);
  check_passes(stream);
  now = bodies[chooser.pick(passes.step(0, step), not_now())].get();
  inputs.assign(given.begin(), given.end());
  timed = wants_times && !is_captured(stream);
  while (timed && marks.size() < static_cast<std::size_t>(passes.count)) marks.emplace_back();
  begin_pass(0, stream);
}

void DeviceLayer::Impl::end(std::span<bf16* const> outputs, DeviceStream stream) {
  if (outputs.size() != parts.locals())
    throw InputError(fmt::format("{} outputs for the {} ranks of GPU {}", outputs.size(), parts.locals(), parts.device()));
  const cuda::DeviceScope scope(parts.device());
  for (int pass = 0; pass < passes.count; ++pass) {
    if (pass > 0) begin_later_pass(pass, stream);
    std::vector<bf16*> places;
    for (bf16* place : outputs) places.push_back(parts.sizes.outputs_from(place, passes.first(pass)));
    now->end(places, stream, marks_of(pass));
  }
}

DeviceLayer::DeviceLayer(DeviceWorkspace& workspace, std::size_t gpu, const ExchangeMemory& memory,
                         std::span<const LayerWeights> weights, const LayerOptions& options, const DeviceLayerOptions& device) {
  check_weights_of_ranks(workspace, gpu, weights);
  impl_ = std::make_unique<Impl>(workspace, gpu, memory, weights, options, device);
}
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
  LayerParts& parts = impl_->parts;
  look([&parts] { parts.workspace.throw_if_aborted(); });
  for (RankExperts& mine : parts.experts) look([&mine] { mine.throw_if_failed(); });
  if (parts.shared != nullptr) look([&parts] { parts.shared->throw_if_failed(); });
  if (first != nullptr) std::rethrow_exception(first);
}

DeviceLayerSeconds DeviceLayer::seconds() const {
  if (!impl_->timed) throw InputError("the last call was not timed: it was captured, or DeviceLayerOptions::timed is off");
  DeviceLayerSeconds seconds;
  for (int pass = 0; pass < impl_->passes.count; ++pass) {
    const auto& at = impl_->marks[static_cast<std::size_t>(pass)].at;
    seconds.dispatch += at[0].seconds_until(at[1]);
    seconds.experts += at[1].seconds_until(at[2]);
    seconds.combine += at[2].seconds_until(at[3]);
  }
  if (impl_->now->wants_shared()) seconds.shared = impl_->parts.shared->seconds();
  return seconds;
}

void DeviceLayer::update_expert(int local_rank, int local, const ExpertWeights& weights, DeviceStream stream) {
  LayerParts& parts = impl_->parts;
  impl_->check_local_rank(local_rank);
  if (parts.experts.empty()) return impl_->bodies.front()->update_expert(local_rank, local, weights, stream);
  parts.experts[static_cast<std::size_t>(local_rank)].update(local, weights, stream);  // the fused layer has the same ones
}

std::shared_ptr<const sm90::DeviceWeights> DeviceLayer::weights(int local_rank) const {
  impl_->check_local_rank(local_rank);
  if (impl_->parts.experts.empty()) return impl_->bodies.front()->weights(local_rank);
  return impl_->parts.experts[static_cast<std::size_t>(local_rank)].weights();
}

Way DeviceLayer::way() const { return impl_->now->settings().way; }
int DeviceLayer::passes() const { return impl_->passes.count; }
WayChoice DeviceLayer::explain(const Step& step) const {
  const Passes passes = Passes::of(impl_->options, impl_->parts.workspace.ranks(), step);
  return impl_->chooser.explain(passes.step(0, step), impl_->not_now());
}
const ExchangeOptions& DeviceLayer::exchange_options() const { return impl_->now->settings(); }
const DeviceExchange& DeviceLayer::exchange() const { return impl_->now->exchange(); }

std::size_t DeviceLayer::weight_bytes() const {
  const LayerParts& parts = impl_->parts;
  std::size_t bytes = parts.shared != nullptr ? parts.shared->weight_bytes() : 0;
  if (impl_->router != nullptr) bytes += impl_->router->weight_bytes();
  for (const RankExperts& mine : parts.experts) bytes += mine.weight_bytes();
  for (const auto& body : impl_->bodies) bytes += body->weight_bytes();
  return bytes;
}

std::size_t DeviceLayer::buffer_bytes() const {
  const LayerParts& parts = impl_->parts;
  std::size_t bytes = parts.shared != nullptr ? parts.shared->buffer_bytes() : 0;
  if (impl_->router != nullptr) bytes += impl_->router->buffer_bytes();
  for (const RankExperts& mine : parts.experts) bytes += mine.buffer_bytes();
  if (parts.slice_out.data() == nullptr) return bytes;
  return bytes + parts.locals() * static_cast<std::size_t>(parts.cap) * parts.sizes.hidden * sizeof(bf16);
}

}  // namespace heddle
