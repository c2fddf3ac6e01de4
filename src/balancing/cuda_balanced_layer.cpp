// A layer on GPUs that counts loads and changes its placement between calls: what a balancer asks of a process with its GPUs.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "balancing/balancer.hpp"
#include "balancing/cuda_moves.hpp"
#include "balancing/look.hpp"
#include "experts/sm90/weights.hpp"
#include "group/agreement.hpp"
#include "group/cuda_workspace.hpp"
#include "heddle/device_balancing.hpp"
#include "heddle/error.hpp"
#include "layer/cuda_own_router.hpp"

namespace heddle {

namespace {

std::size_t index(int value) { return static_cast<std::size_t>(value); }

void check(const DeviceWorkspace& workspace, const LayerSource& source, const ReplicaMap& map, const LayerOptions& options,
           const BalancingOptions& balancing, const DeviceBalancingOptions& ahead) {
  check_balancing(source.shape, map, options, balancing, workspace.impl().map.nodes);
  if (map.ranks() != workspace.ranks())
    throw InputError(fmt::format("a placement on {} ranks in a workspace of {}", map.ranks(), workspace.ranks()));
  if (ahead.calls_ahead < 0) throw InputError(fmt::format("{} calls ahead; 0 or more", ahead.calls_ahead));
  if (ahead.staged_experts && *ahead.staged_experts < 1)
    throw InputError(fmt::format("memory for {} experts on their way to a rank; 1 or more", *ahead.staged_experts));
  if (ahead.most_tokens && *ahead.most_tokens < 1) throw InputError(fmt::format("at most {} tokens a call", *ahead.most_tokens));
}

int most_arrivals_of(const ReplicaMap& map, const DeviceBalancingOptions& ahead) {
  const int places = map.placement().max_local_experts();
  return std::min(places, ahead.staged_experts.value_or(places));
}

int most_tokens_of(const LayerOptions& options, int ranks, const DeviceBalancingOptions& ahead) {
  return ahead.most_tokens.value_or(options.tensor_parallel ? options.cap * ranks : options.cap);
}

}  // namespace

struct DeviceBalancedLayer::Impl final : BalancingEngine {
  Impl(DeviceWorkspace& given, const ExchangeMemory& memory, const LayerSource& source, const ReplicaMap& first,
       const LayerOptions& options, const BalancingOptions& balancing, const DeviceBalancingOptions& ahead,
       const DeviceLayerOptions& device)
      : workspace(given), calls_ahead(ahead.calls_ahead), most_tokens(most_tokens_of(options, first.ranks(), ahead)) {
    Group& processes = given.impl().processes;
    step_together(processes, "the options of a balanced layer", [&] { check(given, source, first, options, balancing, ahead); });
    compare_configurations(
        processes,
        describe_balancing(first, balancing) + fmt::format("calls ahead={}\nmost tokens={}\nstaged experts={}\n", calls_ahead,
                                                           most_tokens, most_arrivals_of(first, ahead)),
        "process");
    const LayerSource physical = physical_source(source, first);
    step_together(processes, "the balanced layer", [&] { make_layers(physical, first, memory, options, device); });
    if (needs_step_exponents(processes)) {
      DeviceLayerOptions with_exponents = device;
      with_exponents.step_exponents = true;
      step_together(processes, "the balanced layer", [&] { make_layers(physical, first, memory, options, with_exponents); });
    }
    step_together(processes, "choosing of copies", [&] { make_copies(first, source.shape.topk, options, balancing); });
    moves.emplace(given, layers, most_arrivals_of(first, ahead));
    balancer.emplace(processes, *this, first, balancing);
  }

  void make_layers(const LayerSource& physical, const ReplicaMap& map, const ExchangeMemory& memory, const LayerOptions& options,
                   const DeviceLayerOptions& device);
  bool needs_step_exponents(Group& processes) const;
  void make_copies(const ReplicaMap& map, int topk, const LayerOptions& options, const BalancingOptions& balancing);

  std::size_t checked(std::size_t gpu) const {
    if (gpu >= layers.size()) throw InputError(fmt::format("GPU number {}; this process has {}", gpu, layers.size()));
    return gpu;
  }
  void begin(std::size_t gpu, std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream);
  void follow(std::span<const DeviceStream> given);

  std::int64_t ended(std::int64_t call) override;
  bool has_all_ranks() const override { return std::ranges::count(workspace.live(), false) == 0; }
  int most_arrivals() const override { return moves->most_arrivals(); }
  void put_counts_aside() override {
    for (std::size_t gpu = 0; gpu < copies.size(); ++gpu) copies[gpu].send_counts(streams[gpu]);
  }
  std::vector<std::int64_t> counts_aside() override;
  void plan(const ReplicaMap& from, const ReplicaMap& to) override { moves->plan(from, to, balancer->options().nodes); }
  std::uint64_t copy_some(std::size_t bytes) override { return moves->copy_some(bytes); }
  bool has_copied_all() override { return moves->has_copied_all(); }
  std::int64_t put_in_place(const ReplicaMap& to) override {
    for (std::size_t gpu = 0; gpu < copies.size(); ++gpu) copies[gpu].update(to, streams[gpu]);
    return moves->put_in_place(streams);
  }
  void forget() override;

  DeviceWorkspace& workspace;
  int calls_ahead, most_tokens;
  std::vector<DeviceLayer> layers;             ///< a GPU
  std::vector<DeviceCopies> copies;            ///< a GPU
  std::vector<std::vector<DeviceEvent>> ends;  ///< [GPU][calls_ahead + 1]: of the last calls
  std::optional<DeviceMoves> moves;
  std::optional<Balancer> balancer;
  std::vector<DeviceStream> streams;  ///< a GPU: what is between two calls is queued there
};

void DeviceBalancedLayer::Impl::make_layers(const LayerSource& physical, const ReplicaMap& map, const ExchangeMemory& memory,
                                            const LayerOptions& options, const DeviceLayerOptions& device) {
  layers.clear();
  for (std::size_t gpu = 0; gpu < workspace.gpus(); ++gpu) {
    std::vector<LayerWeights> weights;
    for (int local = 0; local < workspace.ranks_on(gpu); ++local)
      weights.push_back(LayerWeights::load(physical, map.placement(), workspace.first_rank(gpu) + local));
    layers.emplace_back(workspace, gpu, memory, weights, options, device);
  }
}

/// Experts that change places lie alike on all ranks: where one rank's weights want exponents and another's do not, all have them.
bool DeviceBalancedLayer::Impl::needs_step_exponents(Group& processes) const {
  bool has = false, lacks = false;
  for (std::size_t gpu = 0; gpu < layers.size(); ++gpu) {
    for (int local = 0; local < workspace.ranks_on(gpu); ++local) {
      const auto weights = layers[gpu].weights(local);
      for (const bool matrix_has : {weights->gate_up().plan.step_exponents, weights->down().plan.step_exponents}) {
        has = has || matrix_has;
        lacks = lacks || !matrix_has;
      }
    }
  }
  for (const std::string& text : processes.exchange(fmt::format("{:d}{:d}", has, lacks), "step exponents of weights")) {
    has = has || text.starts_with('1');
    lacks = lacks || text.ends_with('1');
  }
  return has && lacks;
}

void DeviceBalancedLayer::Impl::make_copies(const ReplicaMap& map, int topk, const LayerOptions& options,
                                            const BalancingOptions& balancing) {
  for (std::size_t gpu = 0; gpu < workspace.gpus(); ++gpu) {
    const cuda::DeviceScope scope(workspace.device(gpu));
    copies.emplace_back(workspace.device(gpu), workspace.first_rank(gpu), workspace.ranks_on(gpu), map, balancing.rule, topk,
                        most_tokens, options.tensor_parallel);
    std::vector<DeviceEvent>& own = ends.emplace_back();
    for (int i = 0; i <= calls_ahead; ++i) own.emplace_back(false);
  }
}

void DeviceBalancedLayer::Impl::begin(std::size_t gpu, std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) {
  if (step.max_tokens > most_tokens) {
    throw InputError(fmt::format(
        "the step's largest batch is {} rows, copies are chosen for {}; create the layer with most_tokens of at least {}",
        step.max_tokens, most_tokens, step.max_tokens));
  }
  DeviceLayer& layer = layers[checked(gpu)];
  refuse_missing_ids(inputs);  // copies are chosen of experts that somebody has chosen
  layer.begin(copies[gpu].choose(inputs, stream), step, stream);
}

void DeviceBalancedLayer::Impl::follow(std::span<const DeviceStream> given) {
  if (given.size() != layers.size())
    throw InputError(fmt::format("{} streams for the {} GPUs of this process", given.size(), layers.size()));
  if (std::ranges::any_of(given, is_captured))
    throw InputError("a layer follows the load between replays: call follow() outside of the capture");
  streams.assign(given.begin(), given.end());
  balancer->after_call();
}

std::int64_t DeviceBalancedLayer::Impl::ended(std::int64_t call) {
  const std::int64_t seen = call - calls_ahead;
  const auto at = [this](std::int64_t of) { return static_cast<std::size_t>(of % (calls_ahead + 1)); };
  for (std::size_t gpu = 0; gpu < ends.size(); ++gpu) {
    const cuda::DeviceScope scope(workspace.device(gpu));
    ends[gpu][at(call)].record(streams[gpu]);
  }
  if (seen > 0) {
    for (const std::vector<DeviceEvent>& own : ends) own[at(seen)].wait();
  }
  workspace.throw_if_aborted();  // who left a call early has not heard from all
  return seen;
}

std::vector<std::int64_t> DeviceBalancedLayer::Impl::counts_aside() {
  std::vector<std::int64_t> sums(index(balancer->map().experts()), 0);
  for (const DeviceCopies& own : copies) {
    const std::vector<std::int64_t> counts = own.sent_counts();
    std::ranges::transform(sums, counts, sums.begin(), std::plus<>());
  }
  return sums;
}

void DeviceBalancedLayer::Impl::forget() {
  for (std::size_t gpu = 0; gpu < copies.size(); ++gpu) copies[gpu].take_counts(streams[gpu]);
  moves->forget();
}

DeviceBalancedLayer::DeviceBalancedLayer(DeviceWorkspace& workspace, const ExchangeMemory& memory, const LayerSource& source,
                                         const ReplicaMap& first, const LayerOptions& options, const BalancingOptions& balancing,
                                         const DeviceBalancingOptions& ahead, const DeviceLayerOptions& device)
    : impl_(std::make_unique<Impl>(workspace, memory, source, first, options, balancing, ahead, device)) {}
DeviceBalancedLayer::~DeviceBalancedLayer() = default;
DeviceBalancedLayer::DeviceBalancedLayer(DeviceBalancedLayer&&) noexcept = default;
DeviceBalancedLayer& DeviceBalancedLayer::operator=(DeviceBalancedLayer&&) noexcept = default;

void DeviceBalancedLayer::begin(std::size_t gpu, std::span<const DeviceInput> inputs, const Step& step, DeviceStream stream) {
  impl_->begin(gpu, inputs, step, stream);
}
void DeviceBalancedLayer::end(std::size_t gpu, std::span<bf16* const> outputs, DeviceStream stream) {
  impl_->layers[impl_->checked(gpu)].end(outputs, stream);
}
void DeviceBalancedLayer::follow(std::span<const DeviceStream> streams) { impl_->follow(streams); }
void DeviceBalancedLayer::move_to(const ReplicaMap& map) { impl_->balancer->move_to(map); }
bool DeviceBalancedLayer::is_moving() const { return impl_->balancer->is_moving(); }
const ReplicaMap& DeviceBalancedLayer::map() const { return impl_->balancer->map(); }
const BalancingReport& DeviceBalancedLayer::report() const { return impl_->balancer->report(); }

void DeviceBalancedLayer::throw_if_failed() {
  std::exception_ptr first;
  for (DeviceLayer& layer : impl_->layers) {  // all are asked, so that none remembers
    try {
      layer.throw_if_failed();
    } catch (const Error&) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

const DeviceLayer& DeviceBalancedLayer::layer(std::size_t gpu) const { return impl_->layers[impl_->checked(gpu)]; }
std::size_t DeviceBalancedLayer::staging_bytes() const { return impl_->moves->staging_bytes(); }
DeviceSent DeviceBalancedLayer::sent(std::size_t gpu) { return impl_->moves->sent(impl_->checked(gpu)); }

void DeviceBalancedLayer::reset() {
  impl_->streams = impl_->moves->streams();  // nothing of a call is under way
  impl_->balancer->reset();
}
void DeviceBalancedLayer::close() { impl_->balancer->close(); }

}  // namespace heddle
