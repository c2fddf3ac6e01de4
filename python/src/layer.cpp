// Workspaces and layers of the host engine.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "group.hpp"
#include "layers.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

LayerNeeds needs_of(const nb::list& layers) {
  LayerNeeds needs;
  for (const nb::handle pair : layers) {
    const auto& weights = nb::cast<const RankWeights&>(pair.attr("__getitem__")(0));
    const LayerOptions options = options_of(pair.attr("__getitem__")(1));
    const int ranks = weights.weights.placement.ranks();
    if (needs.ranks != 0 && needs.ranks != ranks)
      throw InputError(fmt::format("layers for {} and for {} ranks cannot share a workspace", needs.ranks, ranks));
    needs.ranks = ranks;
    needs.memory.include(layer_memory(weights.weights, options));
    needs.configuration += fmt::format("layer={}\n", needs.count++) + describe(weights.weights, options);
  }
  if (needs.count == 0) throw InputError("a workspace is made for at least one layer: give (weights, options) of each");
  return needs;
}

namespace {

/// A workspace with what it is made of. Closed, it takes no calls.
class RankWorkspace {
 public:
  RankWorkspace(std::shared_ptr<RankGroup> group, LayerNeeds needs)
      : group_(std::move(group)),
        needs_(std::move(needs)),
        workspace_(group_->group(), needs_.memory.heap_bytes(needs_.ranks), needs_.configuration) {}

  RankGroup& group() const { return *group_; }
  const ExchangeMemory& memory() const { return needs_.memory; }
  std::size_t bytes() const { return bytes_; }
  Workspace& open() {
    if (is_closed_) throw InputError(fmt::format("the workspace of rank {} is closed", group_->group().rank()));
    return workspace_;
  }
  void close() {
    if (std::exchange(is_closed_, true)) return;
    workspace_.close();
  }

 private:
  std::shared_ptr<RankGroup> group_;
  LayerNeeds needs_;
  Workspace workspace_;
  std::size_t bytes_ = workspace_.bytes();
  bool is_closed_ = false;
};

using WorkspacePointer = std::shared_ptr<RankWorkspace>;

WorkspacePointer make_workspace(std::shared_ptr<RankGroup> group, const nb::list& layers) {
  LayerNeeds needs = needs_of(layers);
  if (needs.ranks != group->group().ranks()) {
    throw InputError(fmt::format("the layers are placed on {} ranks, the group has {}", needs.ranks, group->group().ranks()));
  }
  const RankGroup::Turn turn(*group, "a new workspace");
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<RankWorkspace>(group, std::move(needs));
}

void reset(RankWorkspace& self, const std::optional<std::vector<bool>>& live) {
  const RankGroup::Turn turn(self.group(), "reset");
  const nb::gil_scoped_release others_run;
  live ? self.open().reset(*live) : self.open().reset();
}

void close(RankWorkspace& self) {
  const RankGroup::Turn turn(self.group(), "close");
  const nb::gil_scoped_release others_run;
  self.close();
}

class RankLayer {
 public:
  RankLayer(WorkspacePointer workspace, std::shared_ptr<RankWeights> weights, const LayerOptions& options)
      : workspace_(std::move(workspace)),
        weights_(std::move(weights)),
        layer_(workspace_->open(), workspace_->memory(), weights_->weights, options) {}

  void forward(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle step, nb::handle phase);
  /// The same call many times without Python in between, to know what Python takes (bench/python_overhead.py).
  void repeat(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle step, int calls);
  const LayerReport& report() const { return layer_.report(); }
  std::string explain(nb::handle step) const { return layer_.explain(step_of(step)).text(); }
  /// Of the last call that was routed here.
  const Routing& routing() const { return layer_.routing(); }

 private:
  struct Call;
  Call take(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out) const;
  void run(const Call& call, const Step& step);

  WorkspacePointer workspace_;
  std::shared_ptr<RankWeights> weights_;
  MoeLayer layer_;
};

/// The arrays of one call, held until it is over.
struct RankLayer::Call {
  Lent hidden, out;
  std::optional<Lent> ids, weights;  ///< none: the layer's own router chooses
  int tokens() const { return static_cast<int>(hidden.size(0)); }
};

RankLayer::Call RankLayer::take(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out) const {
  const LayerShape& shape = weights_->weights.shape;
  Lent states(hidden, {"hidden", Element::bf16, {"tokens", shape.hidden}});
  const std::int64_t tokens = states.size(0);
  Call call{std::move(states), Lent(out, {"out", Element::bf16, {tokens, shape.hidden}, Access::write}), {}, {}};
  if (ids.is_none() && weights.is_none()) {
    const std::string& refusal = weights_->source->router_refusal;
    if (!refusal.empty()) throw InputError(refusal);
    return call;
  }
  if (ids.is_none() || weights.is_none()) throw InputError("ids and weights: give both, or neither for the layer's own router");
  call.ids.emplace(ids, Wanted{"ids", Element::int32, {tokens, shape.topk}});
  call.weights.emplace(weights, Wanted{"weights", Element::float32, {tokens, shape.topk}});
  return call;
}

void RankLayer::run(const Call& call, const Step& step) {
  auto* const out = call.out.data<bf16>();
  const auto* const hidden = call.hidden.data<const bf16>();
  if (!call.ids) return layer_.forward(call.tokens(), hidden, step, out);
  layer_.forward({call.tokens(), hidden, call.ids->data<const std::int32_t>(), call.weights->data<const float>()}, step, out);
}

void RankLayer::forward(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle step, nb::handle phase) {
  const RankGroup::Turn turn(workspace_->group(), "forward");
  Workspace& workspace = workspace_->open();
  try {
    const Call call = take(hidden, ids, weights, out);
    Step given{0, value_of(phases(), phase, "phase")};
    if (!step.is_none()) given = step_of(step);
    const bool agrees = step.is_none();
    const nb::gil_scoped_release others_run;
    run(call, agrees ? agree_step(workspace.group(), call.tokens(), given.phase) : given);
  } catch (const FaultError&) {
    throw;
  } catch (...) {
    workspace.refuse(1, 0);  // the others shall not wait for a call that was never begun; where one has said so already, that stays
    throw;
  }
}

void RankLayer::repeat(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, nb::handle step, int calls) {
  const RankGroup::Turn turn(workspace_->group(), "repeat");
  const Call call = take(hidden, ids, weights, out);
  const Step given = step_of(step);
  const nb::gil_scoped_release others_run;
  for (int i = 0; i < calls; ++i) run(call, given);
}

std::shared_ptr<RankLayer> make_layer(const WorkspacePointer& workspace, const std::shared_ptr<RankWeights>& weights,
                                      nb::handle given) {
  const LayerOptions options = options_of(given);
  const RankGroup::Turn turn(workspace->group(), "a new layer");
  const nb::gil_scoped_release others_run;
  return make_shared_unlocked<RankLayer>(workspace, weights, options);
}

/// What the router chose in the last call without ids, as views.
nb::tuple routing_of(nb::handle self) {
  const Routing& routing = nb::cast<const RankLayer&>(self).routing();
  const auto tokens = static_cast<std::size_t>(routing.tokens), topk = static_cast<std::size_t>(routing.topk);
  return nb::make_tuple(view_of(routing.ids.data(), {tokens, topk}, self), view_of(routing.weights.data(), {tokens, topk}, self));
}

std::size_t workspace_bytes(const nb::list& layers) {
  const LayerNeeds needs = needs_of(layers);
  return needs.memory.heap_bytes(needs.ranks);
}

}  // namespace

void bind_layer(nb::module_& module) {
  nb::class_<RankWorkspace>(module, "RankWorkspace")
      .def(nb::new_(&make_workspace), "group"_a, "layers"_a)
      .def_prop_ro("bytes", &RankWorkspace::bytes)
      .def("throw_if_aborted", [](RankWorkspace& self) { self.open().throw_if_aborted(); })
      .def("reset", &reset, "live"_a.none())
      .def("close", &close);
  nb::class_<RankLayer>(module, "RankLayer")
      .def(nb::new_(&make_layer), "workspace"_a, "weights"_a, "options"_a)
      .def("forward", &RankLayer::forward, "hidden"_a, "ids"_a.none(), "weights"_a.none(), "out"_a, "step"_a.none(), "phase"_a)
      .def("explain", &RankLayer::explain, "step"_a)
      .def("repeat", &RankLayer::repeat, "hidden"_a, "ids"_a, "weights"_a, "out"_a, "step"_a, "calls"_a)
      .def_prop_ro("routing", [](const nb::object& self) { return routing_of(self); })
      .def_prop_ro("report", [](const RankLayer& self) { return to_python(self.report()); });
  module.def("workspace_bytes", &workspace_bytes, "layers"_a);
}

}  // namespace heddle::python
