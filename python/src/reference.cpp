// The float64 reference, for checks of a layer's outputs.
#include "reference/reference.hpp"

#include <nanobind/stl/string.h>

#include "arrays.hpp"
#include "layer/options.hpp"
#include "options.hpp"
#include "rooms.hpp"
#include "source.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

bool sums_slots(const LayerOptions& options) {
  return options.way == Way::low_latency || options.way == Way::mega ||
         (options.way == Way::elastic && options.reduce == Reduce::home);
}

ReferenceOptions reference_options(const Source& source, const Placement& placement, const LayerOptions& options) {
  LayerWeights weights;  // without experts: enough for the options
  weights.shape = source.source.shape;
  weights.kind = source.source.kind;
  weights.placement = placement;
  weights.shared = source.source.shared;
  ReferenceOptions reference;
  reference.activation = activation_of(weights.kind, options);
  reference.quantisation = options.quantisation;
  reference.clamp = clamp_of(weights.shape, options);
  reference.weight_at = options.weight_at;
  reference.sum = sums_slots(options) ? Sum::slots : Sum::two_stage;
  reference.wire = exchange_options(weights, options).wire;
  reference.combine_wire = options.combine_wire;
  return reference;
}

/// One output a token of the whole batch, whatever rank would bring it.
void reference_into(const Source& source, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out, int ranks,
                    nb::handle placement, nb::handle given) {
  const LayerOptions options = options_of(given);
  if (options.expert_slices) throw InputError("the reference through Python does not know expert slices; heddle verify does");
  const LayerShape& shape = source.source.shape;
  const Placement where = placement_of(placement, shape, ranks);
  const Lent states(hidden, {"hidden", Element::bf16, {"tokens", shape.hidden}});
  const auto tokens = static_cast<std::size_t>(states.size(0)), width = static_cast<std::size_t>(shape.hidden);
  const auto pairs = tokens * static_cast<std::size_t>(shape.topk);
  const Lent choices(ids, {"ids", Element::int32, {states.size(0), shape.topk}});
  const Lent factors(weights, {"weights", Element::float32, {states.size(0), shape.topk}});
  const Lent results(out, {"out", Element::bf16, {states.size(0), shape.hidden}, Access::write});
  const nb::gil_scoped_release others_run;
  ReferenceInput input;
  input.hidden = shape.hidden;
  input.intermediate = shape.intermediate;
  input.experts = shape.experts;
  input.tokens = static_cast<int>(tokens);
  input.topk = shape.topk;
  input.hidden_states = {states.data<const bf16>(), tokens * width};
  input.ids = {choices.data<const std::int32_t>(), pairs};
  input.weights = {factors.data<const float>(), pairs};
  input.expert = source.source.expert;
  input.shared = source.source.shared ? &*source.source.shared : nullptr;
  input.rank_of = where.rank_map();
  const std::vector<bf16> values = reference_layer(input, reference_options(source, where, options));
  std::copy(values.begin(), values.end(), results.data<bf16>());
}

}  // namespace

void bind_reference(nb::module_& module) {
  module.def("reference_into", &reference_into, "source"_a, "hidden"_a, "ids"_a, "weights"_a, "out"_a, "ranks"_a,
             "placement"_a.none(), "options"_a);
}

}  // namespace heddle::python
