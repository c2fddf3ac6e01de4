// The planner and the token budget.
#include "heddle/plan.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

constexpr const char* module_name = "heddle.planning";

PlanRequest request_of(nb::handle given) {
  PlanRequest request;
  request.shape = shape_of(given.attr("shape"));
  request.weights = value_of(tool::kinds, given.attr("weights"), "weights");
  request.shared_experts = field<int>(given, "shared_experts");
  request.ranks = field<int>(given, "ranks");
  request.tokens = field<int>(given, "tokens");
  request.cap = field<std::optional<int>>(given, "cap").value_or(request.tokens);
  request.quantisation = quantisation_of(given.attr("quantisation"));
  const nb::object wire = given.attr("wire");
  request.wire = request.activation() == Activation::fp8 ? Wire::fp8 : Wire::bf16;
  if (!wire.is_none()) request.wire = value_of(tool::wires, wire, "wire");
  request.combine_wire = value_of(tool::wires, given.attr("combine_wire"), "combine_wire");
  request.machine = find_machine(field<std::string>(given, "machine"));
  return request;
}

nb::list sections_of(const Plan& plan) {
  constexpr const char* units[] = {"count", "copies", "rows", "bytes", "seconds", "ratio"};
  const nb::object section_class = python_class("Section", module_name), quantity_class = python_class("Quantity", module_name);
  nb::list sections;
  for (const Section& section : plan.sections) {
    nb::list quantities;
    for (const Quantity& q : section.quantities)
      quantities.append(quantity_class(q.name, q.title, q.value, units[static_cast<int>(q.unit)], q.formula, q.source));
    sections.append(section_class(section.name, section.title, nb::tuple(quantities)));
  }
  return sections;
}

nb::object object_of(const ModelPreset& preset) {
  nb::list weights;
  for (const WeightKind kind : preset.weights) weights.append(tool::word_of(tool::kinds, kind));
  const nb::object shared =
      preset.shared_weights ? nb::cast(tool::word_of(tool::kinds, *preset.shared_weights)) : nb::object(nb::none());
  return python_class("Preset", module_name)(preset.name, to_python(preset.shape), preset.shared_experts, nb::tuple(weights),
                                             shared, preset.plan_only, preset.note);
}

nb::list presets() {
  nb::list all;
  for (const ModelPreset& preset : model_presets()) all.append(object_of(preset));
  return all;
}

nb::object bound_of(nb::handle budget) {
  const TokenBound bound = token_bound(budget_of(budget));
  return python_class("TokenBound")(bound.decode, bound.prefill);
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("presets", &presets);
  module.def(
      "preset", [](const std::string& name) { return object_of(find_preset(name)); }, "name"_a);
  module.def(
      "plan", [](nb::handle request) { return sections_of(make_plan(request_of(request))); }, "request"_a);
  module.def("token_bound", &bound_of, "budget"_a);
  module.def(
      "check_cap", [](nb::handle budget, int cap) { check_cap(budget_of(budget), cap); }, "budget"_a, "cap"_a);
  module.def(
      "budget_plan",
      [](nb::handle budget, nb::handle request, std::optional<int> cap) {
        return sections_of(make_budget_plan(budget_of(budget), request_of(request), cap));
      },
      "budget"_a, "request"_a, "cap"_a.none());
}

}  // namespace heddle::python
