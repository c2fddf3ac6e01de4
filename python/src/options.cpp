#include "options.hpp"

#include <nanobind/stl/vector.h>

namespace heddle::python {

namespace {

template <class Value>
Value word(nb::handle object, const char* name, const std::map<std::string, Value>& words) {
  return value_of(words, object.attr(name), name);
}

template <class Value>
std::optional<Value> optional_word(nb::handle object, const char* name, const std::map<std::string, Value>& words) {
  const nb::object given = object.attr(name);
  if (given.is_none()) return std::nullopt;
  return value_of(words, given, name);
}

const std::map<std::string, GatherMode>& gather_modes() {
  static const std::map<std::string, GatherMode> words = [] {
    auto all = tool::gather_modes;
    all.emplace("tensor_parallel", GatherMode::tensor_parallel);
    return all;
  }();
  return words;
}

/// What way auto chooses by. Without a file: the shipped table.
AutoOptions auto_options_of(nb::handle given) {
  AutoOptions automatic;
  if (const auto path = field<std::optional<std::string>>(given, "tuning")) {
    automatic.table = std::make_shared<const TuningTable>(TuningTable::read(*path));
  }
  automatic.sums = word(given, "sums", tool::sum_orders);
  for (const nb::handle candidate : given.attr("candidates")) {
    automatic.ways.push_back(value_of(ways(), candidate, "candidates"));
  }
  return automatic;
}

nb::object to_python(const PhaseReport& phase) {
  return python_class("PhaseReport")(phase.seconds, phase.remote_bytes, phase.local_bytes);
}

}  // namespace

nb::object python_class(const char* name, const char* module) { return nb::module_::import_(module).attr(name); }

const std::map<std::string, Way>& ways() {
  static const std::map<std::string, Way> words = [] {
    std::map<std::string, Way> all;
    for (const Way way : real_ways) all.emplace(name(way), way);
    all.emplace(name(Way::automatic), Way::automatic);
    return all;
  }();
  return words;
}

const std::map<std::string, ArrivedLayout>& layouts() {
  static const std::map<std::string, ArrivedLayout> words{
      {"contiguous", ArrivedLayout::contiguous}, {"masked", ArrivedLayout::masked}, {"routed", ArrivedLayout::routed}};
  return words;
}

const std::map<std::string, Phase>& phases() {
  static const std::map<std::string, Phase> words{{"decode", Phase::decode}, {"prefill", Phase::prefill}};
  return words;
}

LayerShape shape_of(nb::handle shape) {
  return {field<int>(shape, "hidden"), field<int>(shape, "intermediate"), field<int>(shape, "experts"), field<int>(shape, "topk"),
          field<std::optional<float>>(shape, "clamp")};
}

nb::object to_python(const LayerShape& shape) {
  return python_class("LayerShape")(shape.hidden, shape.intermediate, shape.experts, shape.topk, shape.clamp);
}

Quantisation quantisation_of(nb::handle quantisation) {
  return {field<int>(quantisation, "group"), word(quantisation, "scale", tool::scales)};
}

LayerOptions options_of(nb::handle given) {
  LayerOptions options;
  options.way = word(given, "way", ways());
  options.runner = word(given, "runner", tool::runners);
  options.cap = field<int>(given, "cap");
  options.activation = optional_word(given, "activation", tool::activations);
  options.quantisation = quantisation_of(given.attr("quantisation"));
  options.wire = optional_word(given, "wire", tool::wires);
  options.combine_wire = word(given, "combine_wire", tool::wires);
  options.weight_at = word(given, "weight_at", tool::weight_places);
  options.reduce = word(given, "reduce", tool::reduces);
  options.cpu_sync = field<bool>(given, "cpu_sync");
  options.gather = word(given, "gather", gather_modes());
  options.clamp = field<std::optional<float>>(given, "clamp");
  options.shared = word(given, "shared", tool::shared_modes);
  options.tensor_parallel = field<bool>(given, "tensor_parallel");
  options.expert_slices = field<bool>(given, "expert_slices");
  options.workers = field<int>(given, "workers");
  options.block_rows = field<int>(given, "block_rows");
  options.ring = word(given, "ring", tool::ring_sizes);
  options.overflow = word(given, "overflow", tool::overflows);
  if (options.way == Way::automatic) options.automatic = auto_options_of(given);
  return options;
}

Step step_of(nb::handle step) { return {field<int>(step, "max_tokens"), word(step, "phase", phases())}; }

TokenBudget budget_of(nb::handle given) {
  TokenBudget budget;
  budget.decode_graphs = field<std::vector<int>>(given, "decode_graphs");
  budget.request_tokens = field<int>(given, "request_tokens");
  budget.speculative_rows = field<int>(given, "speculative_rows");
  budget.prefill_chunk = field<std::optional<int>>(given, "prefill_chunk");
  budget.data_parallel_groups = field<int>(given, "data_parallel_groups");
  return budget;
}

nb::object to_python(const LayerReport& report) {
  return python_class("LayerReport")(to_python(report.dispatch), to_python(report.regroup), to_python(report.gemm1),
                                     to_python(report.activation), to_python(report.gemm2), to_python(report.combine),
                                     report.shared_seconds, tool::word_of(layouts(), report.layout), report.host_waited,
                                     report.rows_sent, report.rows_received, report.rows_real, report.rows_room,
                                     tool::word_of(ways(), report.way), report.passes);
}

nb::object to_python(const RouterOptions& router) {
  return python_class("RouterOptions")(tool::word_of(tool::scores, router.score), router.topk, router.groups, router.topk_groups,
                                       router.renormalise, router.scale);
}

RouterOptions router_of(nb::handle router) {
  return {word(router, "score", tool::scores), field<int>(router, "topk"),         field<int>(router, "groups"),
          field<int>(router, "topk_groups"),   field<bool>(router, "renormalise"), field<float>(router, "scale")};
}

}  // namespace heddle::python
