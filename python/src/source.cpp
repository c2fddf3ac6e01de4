#include "source.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "arrays.hpp"
#include "layer/synthetic.hpp"
#include "matrices.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

using Pointer = std::shared_ptr<const Source>;

Pointer open_checkpoint(const std::string& path, std::optional<int> layer_index) {
  const nb::gil_scoped_release others_run;
  auto checkpoint = std::make_shared<LayerCheckpoint>(LayerCheckpoint::open(path, {layer_index}));
  auto made = std::make_shared<Source>();
  made->source = source_of(*checkpoint);
  made->prefix = checkpoint->prefix();
  made->router_weights.assign(checkpoint->router_weights().begin(), checkpoint->router_weights().end());
  made->router_bias.assign(checkpoint->router_bias().begin(), checkpoint->router_bias().end());
  try {
    if (checkpoint->has_router()) made->router = checkpoint->router_options();
  } catch (const InputError& error) {
    made->router_refusal = error.what();  // of no matter to who brings ids and weights
  }
  made->owner = std::move(checkpoint);
  return made;
}

Pointer draw(nb::handle shape, nb::handle kind, nb::handle shared_kind, int shared_intermediate, std::uint64_t seed) {
  SyntheticOptions options;
  options.shape = shape_of(shape);
  options.kind = value_of(tool::kinds, kind, "kind");
  if (!shared_kind.is_none()) {
    options.shared_kind = value_of(tool::kinds, shared_kind, "shared_kind");
    options.shared_intermediate = shared_intermediate > 0 ? shared_intermediate : options.shape.intermediate;
  }
  options.seed = seed;
  const nb::gil_scoped_release others_run;
  auto layer = std::make_shared<SyntheticLayer>(options);
  auto made = std::make_shared<Source>();
  made->source = layer->source();
  made->router_weights = layer->router_weights();
  made->router_bias = layer->router_bias();
  made->owner = std::move(layer);
  return made;
}

/// Arrays of Python that outlive a call; let go with the GIL, whoever is last.
std::shared_ptr<std::vector<Lent>> keep(std::vector<Lent> arrays) {
  return {new std::vector<Lent>(std::move(arrays)), [](std::vector<Lent>* kept) {
            const nb::gil_scoped_acquire gil;
            delete kept;
          }};
}

WeightMatrix part_of(const Lent& stack, std::size_t index, int rows, int cols) {
  const std::size_t values = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  const auto* first = stack.data<const bf16>() + index * values;
  return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(first, values)), {}, ScaleFormat::f32, 1.0f};
}

Pointer of_arrays(nb::handle gate, nb::handle up, nb::handle down, int topk, std::optional<float> clamp, nb::handle shared) {
  std::vector<Lent> arrays;
  arrays.emplace_back(gate, Wanted{"gate", Element::bf16, {"experts", "intermediate", "hidden"}});
  const std::int64_t experts = arrays[0].size(0), intermediate = arrays[0].size(1), hidden = arrays[0].size(2);
  arrays.emplace_back(up, Wanted{"up", Element::bf16, {experts, intermediate, hidden}});
  arrays.emplace_back(down, Wanted{"down", Element::bf16, {experts, hidden, intermediate}});
  if (!shared.is_none()) {
    arrays.emplace_back(shared.attr("__getitem__")(0), Wanted{"shared gate", Element::bf16, {"intermediate", hidden}});
    arrays.emplace_back(shared.attr("__getitem__")(1), Wanted{"shared up", Element::bf16, {arrays[3].size(0), hidden}});
    arrays.emplace_back(shared.attr("__getitem__")(2), Wanted{"shared down", Element::bf16, {hidden, arrays[3].size(0)}});
  }
  const auto kept = keep(std::move(arrays));
  const auto of = [kept](std::size_t first, std::size_t index, int h, int d) {
    return ExpertWeights{part_of((*kept)[first], index, d, h), part_of((*kept)[first + 1], index, d, h),
                         part_of((*kept)[first + 2], index, h, d)};
  };
  auto made = std::make_shared<Source>();
  LayerSource& source = made->source;
  source.shape = {static_cast<int>(hidden), static_cast<int>(intermediate), static_cast<int>(experts), topk, clamp};
  source.expert = [of, shape = source.shape](int id) {
    if (id < 0 || id >= shape.experts) throw InputError(fmt::format("no expert {}: there are {}", id, shape.experts));
    return of(0, static_cast<std::size_t>(id), shape.hidden, shape.intermediate);
  };
  if (!shared.is_none()) {
    const int wide = static_cast<int>((*kept)[3].size(0));
    source.shared = SharedExpert{of(3, 0, source.shape.hidden, wide), wide, {}, nullptr};
  }
  made->owner = kept;
  return made;
}

/// Experts [first, first + those of the arrays) of `experts`: gate_up [.., 2 D, H], gate first, and down [.., H, D].
Pointer of_fused(nb::handle gate_up, nb::handle down, nb::handle kind, nb::handle gate_up_scales, nb::handle down_scales, int topk,
                 std::optional<float> clamp, int first, std::optional<int> experts) {
  struct Stacks {
    MatrixStack gate_up, down;
  };
  auto made = std::make_shared<Source>();
  LayerSource& source = made->source;
  source.kind = value_of(tool::kinds, kind, "kind");
  const std::shared_ptr<const Stacks> stacks(
      new Stacks{MatrixStack("gate_up", source.kind, gate_up, gate_up_scales), MatrixStack("down", source.kind, down, down_scales)},
      [](const Stacks* kept) {
        const nb::gil_scoped_acquire gil;
        delete kept;
      });
  const int here = stacks->gate_up.count(), wide = stacks->gate_up.rows() / 2, hidden = stacks->gate_up.cols();
  if (stacks->down.count() != here || stacks->down.rows() != hidden || stacks->down.cols() != wide ||
      stacks->gate_up.rows() % 2 != 0) {
    throw InputError(
        fmt::format("gate_up is [{}, {}, {}] and down [{}, {}, {}] in values; expected [experts, 2 D, H] and [experts, H, D]", here,
                    stacks->gate_up.rows(), hidden, stacks->down.count(), stacks->down.rows(), stacks->down.cols()));
  }
  const int all = experts ? *experts : first + here;
  if (first < 0 || first + here > all)
    throw InputError(fmt::format("experts {} to {} of a layer that has {}", first, first + here - 1, all));
  source.shape = {hidden, wide, all, topk, clamp};
  source.expert = [stacks, first, here, wide](int id) {
    if (id < first || id >= first + here)
      throw InputError(fmt::format("expert {} is not in these arrays, which have {} to {}", id, first, first + here - 1));
    const MatrixStack& both = stacks->gate_up;
    return ExpertWeights{both.part(id - first, 0, wide), both.part(id - first, wide, wide), stacks->down.matrix(id - first)};
  };
  made->owner = stacks;
  return made;
}

Pointer with_topk(const Pointer& source, int topk) {
  auto changed = std::make_shared<Source>(*source);
  changed->source.shape.topk = topk;
  return changed;
}

/// Chooses into arrays of Python: ids [tokens, k] int32, weights [tokens, k] float32.
void route_into(const Source& self, nb::handle hidden, nb::handle router, nb::handle ids_out, nb::handle weights_out) {
  if (self.router_weights.empty()) throw InputError("this layer has no router: ids and weights come with the batch");
  if (router.is_none() && !self.router) {
    throw InputError(self.router_refusal.empty() ? "config.json does not say how scores are made: give RouterOptions"
                                                 : self.router_refusal);
  }
  const RouterOptions options = router.is_none() ? *self.router : router_of(router);
  const LayerShape& shape = self.source.shape;
  const Lent states(hidden, {"hidden", Element::bf16, {"tokens", shape.hidden}});
  const Lent ids(ids_out, {"ids", Element::int32, {states.size(0), options.topk}, Access::write});
  const Lent weights(weights_out, {"weights", Element::float32, {states.size(0), options.topk}, Access::write});
  const int tokens = static_cast<int>(states.size(0));
  const nb::gil_scoped_release others_run;
  const std::span values(states.data<const bf16>(), static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape.hidden));
  const auto logits = router_logits(values, self.router_weights, tokens, shape.hidden, shape.experts);
  const Routing chosen = route(logits, self.router_bias, tokens, shape.experts, options);
  std::copy(chosen.ids.begin(), chosen.ids.end(), ids.data<std::int32_t>());
  std::copy(chosen.weights.begin(), chosen.weights.end(), weights.data<float>());
}

std::shared_ptr<RankWeights> load(const Pointer& source, int rank, int ranks, nb::handle placement, bool slices) {
  const LayerShape& shape = source->source.shape;
  const Placement where = slices ? Placement::everywhere(shape.experts, ranks) : placement_of(placement, shape, ranks);
  if (rank < 0 || rank >= ranks) throw InputError(fmt::format("rank {} is outside of a group of {} ranks", rank, ranks));
  const nb::gil_scoped_release others_run;
  auto share = std::make_shared<RankWeights>(RankWeights{source, LayerWeights::load(source->source, where, rank)});
  const bool chooses = !source->router_weights.empty() && source->router && source->router->topk == shape.topk;
  if (chooses) share->weights.router = LayerRouter{source->router_weights, source->router_bias, *source->router};
  return share;
}

}  // namespace

Placement placement_of(nb::handle placement, const LayerShape& shape, int ranks) {
  if (ranks < 1) throw InputError(fmt::format("{} ranks: at least 1 is needed", ranks));
  if (placement.is_none()) return Placement::contiguous(shape.experts, ranks);
  return Placement::from_map(nb::cast<std::vector<int>>(placement), ranks);
}

void bind_source(nb::module_& module) {
  nb::class_<Source>(module, "Source")
      .def_static("open", &open_checkpoint, "path"_a, "layer_index"_a = nb::none())
      .def_static("draw", &draw, "shape"_a, "kind"_a, "shared_kind"_a.none(), "shared_intermediate"_a, "seed"_a)
      .def_static("of_arrays", &of_arrays, "gate"_a, "up"_a, "down"_a, "topk"_a, "clamp"_a.none(), "shared"_a.none())
      .def_static("of_fused", &of_fused, "gate_up"_a, "down"_a, "kind"_a, "gate_up_scales"_a.none(), "down_scales"_a.none(),
                  "topk"_a, "clamp"_a.none(), "first"_a, "experts"_a.none())
      .def("with_topk", &with_topk, "topk"_a)
      .def("route_into", &route_into, "hidden"_a, "router"_a.none(), "ids"_a, "weights"_a)
      .def("load", &load, "rank"_a, "ranks"_a, "placement"_a.none(), "slices"_a)
      .def_prop_ro("shape", [](const Source& self) { return to_python(self.source.shape); })
      .def_prop_ro("kind", [](const Source& self) { return tool::word_of(tool::kinds, self.source.kind); })
      .def_prop_ro("prefix", [](const Source& self) { return self.prefix; })
      .def_prop_ro("has_shared", [](const Source& self) { return self.source.shared.has_value(); })
      .def_prop_ro("has_router", [](const Source& self) { return !self.router_weights.empty(); })
      .def_prop_ro("router", [](const Source& self) { return self.router ? to_python(*self.router) : nb::none(); });
  nb::class_<RankWeights>(module, "RankWeights")
      .def_prop_ro("shape", [](const RankWeights& self) { return to_python(self.weights.shape); })
      .def_prop_ro("ranks", [](const RankWeights& self) { return self.weights.placement.ranks(); })
      .def_prop_ro("experts", [](const RankWeights& self) { return self.weights.experts.size(); });
}

}  // namespace heddle::python
