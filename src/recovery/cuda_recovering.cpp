// Recovery on GPUs: every mask has a device workspace of its own, over the processes that are left. Memory of a lost process stays
// mapped until then, so kernels under way end by their deadline and nowhere else.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "group/cuda_workspace.hpp"
#include "heddle/device_recovery.hpp"
#include "layer/body.hpp"
#include "recovery/driver.hpp"
#include "recovery/moving.hpp"

namespace heddle {

struct RecoveringDeviceLayers::Impl {
  Impl(Group& processes, const DeviceGroupOptions& own, std::vector<ContextLayer> given, const RecoveryOptions& the_options,
       const DeviceLayerOptions& the_device)
      : group(processes),
        mine(own),
        original(std::move(given)),
        options(the_options),
        device(the_device),
        now(original),
        dense(original),
        driver(group, options,
               {[this] { interrupt(); }, [this](const Members& members, Interruption& times) { rebuild(members, times); },
                [this](int rank) { return process_of(rank); }}) {
    if (group.nodes() > 1 || mine.nodes.nodes > 1) {
      throw InputError(fmt::format("recovery on GPUs knows one node, there are {}; the host engine's RecoveringLayers know several",
                                   std::max(group.nodes(), mine.nodes.nodes)));
    }
    for (const ContextLayer& layer : original) {
      check_movable(layer);
      if (layer.placement.ranks() != group.ranks() * mine.ranks) {
        throw InputError(fmt::format("a placement of {} ranks for {} processes of {} ranks each; all processes bring as many",
                                     layer.placement.ranks(), group.ranks(), mine.ranks));
      }
    }
  }

  /// Kernels of this process and of others leave; not needed where one has given up already.
  void interrupt() {
    if (!workspace) return;
    try {
      workspace->throw_if_aborted();
    } catch (const FaultError&) {
      return;
    }
    const int rank = workspace->first_rank(0);
    workspace->impl().give_up(rank, {{WordKind::failed, -1, -1}, rank, 0, 0});
  }

  /// Of a rank as the workspace numbers them, without gaps; -1: of none.
  int process_of(int rank) const {
    int before = rank / mine.ranks;
    for (int process = 0; process < group.ranks(); ++process) {
      if (driver.members().live[static_cast<std::size_t>(process)] && before-- == 0) return process;
    }
    return -1;
  }

  std::vector<bool> live_ranks(const Members& members) const {
    std::vector<bool> live;
    for (const bool process : members.live) live.insert(live.end(), static_cast<std::size_t>(mine.ranks), process);
    return live;
  }

  void rebuild(const Members& members, Interruption& times) {
    LapWatch watch;
    layers.clear();
    workspace.reset();  // waits for the own GPUs, whose kernels end by their deadline
    if (members.generation > 0) group.begin_era(members.generation, members.live);
    times.meet += watch.lap();
    const std::vector<bool> live = live_ranks(members);
    times.experts_moved = place_experts(now, original, options.rehome, live, group.rank() * mine.ranks, mine.ranks);
    for (std::size_t i = 0; i < now.size(); ++i) dense[i].placement = without_gaps(now[i].placement, live);
    const ContextPlan plan = plan_context(dense);
    workspace.emplace(group, mine, plan.heap_bytes, plan.configuration + fmt::format("generation={}\n", members.generation));
    times.memory += watch.lap();
    for (const ContextLayer& layer : dense) layers.push_back(layers_of(layer, plan.memory));
    group.barrier("experts of the new mask");
    times.experts += watch.lap();
  }

  /// One layer on each GPU of this process.
  std::vector<DeviceLayer> layers_of(const ContextLayer& layer, const ExchangeMemory& memory) {
    std::vector<DeviceLayer> made;
    for (std::size_t gpu = 0; gpu < workspace->gpus(); ++gpu) {
      std::vector<LayerWeights> weights;
      for (int local = 0; local < workspace->ranks_on(gpu); ++local)
        weights.push_back(LayerWeights::load(*layer.source, layer.placement, workspace->first_rank(gpu) + local));
      made.emplace_back(*workspace, gpu, memory, weights, layer.options, device);
    }
    return made;
  }

  Group& group;
  DeviceGroupOptions mine;
  std::vector<ContextLayer> original;
  RecoveryOptions options;
  DeviceLayerOptions device;
  std::vector<ContextLayer> now;    ///< ranks as they were at the beginning
  std::vector<ContextLayer> dense;  ///< ranks as the workspace numbers them
  std::optional<DeviceWorkspace> workspace;
  std::vector<std::vector<DeviceLayer>> layers;  ///< by layer, then by GPU
  RecoveryDriver driver;
};

RecoveringDeviceLayers::RecoveringDeviceLayers(Group& processes, const DeviceGroupOptions& mine, std::vector<ContextLayer> layers,
                                               const RecoveryOptions& options, const DeviceLayerOptions& device, Entry entry)
    : impl_(std::make_unique<Impl>(processes, mine, std::move(layers), options, device)) {
  impl_->driver.start(entry);
}
RecoveringDeviceLayers::~RecoveringDeviceLayers() = default;
RecoveringDeviceLayers::RecoveringDeviceLayers(RecoveringDeviceLayers&&) noexcept = default;
RecoveringDeviceLayers& RecoveringDeviceLayers::operator=(RecoveringDeviceLayers&&) noexcept = default;

void RecoveringDeviceLayers::step(const std::function<void()>& body) { impl_->driver.step(body); }
void RecoveringDeviceLayers::rejoin() { impl_->driver.rejoin(); }
DeviceLayer& RecoveringDeviceLayers::layer(std::size_t number, std::size_t gpu) { return impl_->layers.at(number).at(gpu); }
DeviceWorkspace& RecoveringDeviceLayers::workspace() { return *impl_->workspace; }
const Placement& RecoveringDeviceLayers::placement(std::size_t number) const { return impl_->dense.at(number).placement; }
const Members& RecoveringDeviceLayers::members() const { return impl_->driver.members(); }
std::uint32_t RecoveringDeviceLayers::steps() const { return impl_->driver.steps(); }
const std::vector<Interruption>& RecoveringDeviceLayers::interruptions() const { return impl_->driver.interruptions(); }

}  // namespace heddle
