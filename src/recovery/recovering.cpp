// Recovery on the host engine: every mask has a workspace of its own. A rank that was only stopped may go on later in the middle of
// a copy; it then writes to the old one, which nobody reads.
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "exchange/nodes/mail.hpp"
#include "layer/body.hpp"
#include "recovery/driver.hpp"
#include "recovery/moving.hpp"
#include "signal/fault.hpp"

namespace heddle {

struct RecoveringLayers::Impl {
  Impl(Group& the_group, std::vector<ContextLayer> the_layers, const RecoveryOptions& the_options)
      : group(the_group),
        original(std::move(the_layers)),
        options(the_options),
        now(original),
        driver(group, options,
               {[this] { interrupt(); }, [this](const Members& members, Interruption& times) { rebuild(members, times); },
                [](int rank) { return rank; }}) {
    for (const ContextLayer& layer : original) check_movable(layer);
  }

  void interrupt() {
    const FaultRecord record{{WordKind::failed, -1, -1}, group.rank(), 0, 0};
    if (workspace) raise_abort(workspace->view(), record);
    if (group.link() != nullptr) tell_nodes(*group.link(), group.live(), group.ranks() / group.nodes(), group.rank(), record);
  }

  void rebuild(const Members& members, Interruption& times) {
    LapWatch watch;
    layers.clear();
    if (members.generation > 0) group.begin_era(members.generation, members.live);
    if (workspace) workspace->abandon();
    workspace.reset();
    times.meet += watch.lap();
    times.experts_moved = place_experts(now, original, options.rehome, members.live, group.rank(), 1);
    const ContextPlan plan = plan_context(now);
    workspace.emplace(group, plan.heap_bytes, plan.configuration + fmt::format("generation={}\n", members.generation));
    times.memory += watch.lap();
    for (const ContextLayer& layer : now) {
      layers.emplace_back(*workspace, plan.memory, LayerWeights::load(*layer.source, layer.placement, group.rank()), layer.options);
    }
    group.barrier("experts of the new mask");
    times.experts += watch.lap();
  }

  Group& group;
  std::vector<ContextLayer> original;
  RecoveryOptions options;
  std::vector<ContextLayer> now;
  std::optional<Workspace> workspace;
  std::vector<MoeLayer> layers;
  RecoveryDriver driver;
};

RecoveringLayers::RecoveringLayers(Group& group, std::vector<ContextLayer> layers, const RecoveryOptions& options, Entry entry)
    : impl_(std::make_unique<Impl>(group, std::move(layers), options)) {
  impl_->driver.start(entry);
}
RecoveringLayers::~RecoveringLayers() = default;
RecoveringLayers::RecoveringLayers(RecoveringLayers&&) noexcept = default;
RecoveringLayers& RecoveringLayers::operator=(RecoveringLayers&&) noexcept = default;

void RecoveringLayers::step(const std::function<void()>& body) { impl_->driver.step(body); }
void RecoveringLayers::forward(const LayerInput& input, const Step& step, bf16* out) {
  impl_->driver.step([&] { layer(0).forward(input, step, out); });
}
void RecoveringLayers::rejoin() { impl_->driver.rejoin(); }
MoeLayer& RecoveringLayers::layer(std::size_t number) { return impl_->layers.at(number); }
const Placement& RecoveringLayers::placement(std::size_t number) const { return impl_->now.at(number).placement; }
const Members& RecoveringLayers::members() const { return impl_->driver.members(); }
std::uint32_t RecoveringLayers::steps() const { return impl_->driver.steps(); }
const std::vector<Interruption>& RecoveringLayers::interruptions() const { return impl_->driver.interruptions(); }
void RecoveringLayers::close() { impl_->workspace->close(); }

}  // namespace heddle
