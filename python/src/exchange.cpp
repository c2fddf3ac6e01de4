// One way on the host engine without experts of its own: rows out, results home. What adapters of other systems stand on.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "exchanges.hpp"
#include "group.hpp"
#include "options.hpp"
#include "rooms.hpp"
#include "source.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

class RankExchange {
 public:
  RankExchange(std::shared_ptr<RankGroup> group, const ExchangeOptions& options)
      : group_(std::move(group)),
        options_(options),
        memory_(exchange_memory(options)),
        workspace_(group_->group(), memory_.heap_bytes(options.placement.ranks()), describe(options)),
        exchange_(create_exchange(workspace_, options_, memory_)) {}

  void dispatch(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle step);
  void combine(nb::handle results, nb::handle out);
  void reset(const std::optional<std::vector<bool>>& live) {
    const RankGroup::Turn turn(*group_, "reset");
    Workspace& workspace = open();
    call_.reset();
    const nb::gil_scoped_release others_run;
    live ? workspace.reset(*live) : workspace.reset();
  }
  void close() {
    const RankGroup::Turn turn(*group_, "close");
    if (std::exchange(is_closed_, true)) return;
    call_.reset();
    const nb::gil_scoped_release others_run;
    workspace_.close();
  }
  const Arrived& arrived() const {
    if (!call_) throw InputError("nothing has arrived: dispatch comes first");
    return arrived_;
  }
  const ExchangeOptions& options() const { return options_; }
  std::size_t bytes() const { return bytes_; }
  std::vector<int> experts() const {
    const auto mine = options_.placement.experts_of(group_->group().rank());
    return {mine.begin(), mine.end()};
  }

 private:
  /// The tokens of a round trip, held until it is over.
  struct Call {
    Lent hidden, ids, weights;
  };
  Workspace& open() {
    if (is_closed_) throw InputError(fmt::format("the exchange of rank {} is closed", group_->group().rank()));
    return workspace_;
  }
  Call take(nb::handle hidden, nb::handle ids, nb::handle weights) const;
  /// What is wrong with this rank's arrays is told to the others, who would wait for it.
  template <class Step>
  void or_refuse(Step&& step) {
    try {
      step();
    } catch (const FaultError&) {
      throw;
    } catch (...) {
      workspace_.refuse(1, 0);
      throw;
    }
  }

  std::shared_ptr<RankGroup> group_;
  ExchangeOptions options_;
  ExchangeMemory memory_;
  Workspace workspace_;
  std::size_t bytes_ = workspace_.bytes();
  std::unique_ptr<Exchange> exchange_;
  bool is_closed_ = false;
  std::optional<Call> call_;
  Arrived arrived_;
};

RankExchange::Call RankExchange::take(nb::handle hidden, nb::handle ids, nb::handle weights) const {
  Lent states(hidden, {"hidden", Element::bf16, {"tokens", options_.hidden}});
  const std::int64_t tokens = states.size(0);
  return {std::move(states), Lent(ids, {"ids", Element::int32, {tokens, options_.topk}}),
          Lent(weights, {"weights", Element::float32, {tokens, options_.topk}})};
}

void RankExchange::dispatch(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle given) {
  const RankGroup::Turn turn(*group_, "dispatch");
  open();
  if (call_) throw InputError("a dispatch is under way: combine comes before the next one");
  or_refuse([&] {
    call_ = take(hidden, ids, weights);
    const ExchangeInput input{static_cast<int>(call_->hidden.size(0)),
                              call_->hidden.data<const bf16>(),
                              call_->ids.data<const std::int32_t>(),
                              call_->weights.data<const float>(),
                              {}};
    const std::optional<Step> step = given.is_none() ? std::nullopt : std::optional(step_of(given));
    try {
      const nb::gil_scoped_release others_run;
      arrived_ = exchange_->dispatch(input, step ? *step : agree_step(group_->group(), input.tokens, Phase::decode));
    } catch (...) {
      call_.reset();
      throw;
    }
  });
}

void RankExchange::combine(nb::handle given, nb::handle out) {
  const RankGroup::Turn turn(*group_, "combine");
  open();
  arrived();
  or_refuse([&] {
    const Lent results(given, {"results", Element::bf16, result_sizes(arrived_, options_)});
    const Lent outputs(out, {"out", Element::bf16, {call_->hidden.size(0), options_.hidden}, Access::write});
    CombineOutput output;
    output.out = outputs.data<bf16>();
    const nb::gil_scoped_release others_run;
    exchange_->combine(results.data<const bf16>(), output);
  });
  call_.reset();
}

std::shared_ptr<RankExchange> make_exchange(std::shared_ptr<RankGroup> group, nb::handle given) {
  const ExchangeOptions options = exchange_options_of(given, group->group().ranks());
  const RankGroup::Turn turn(*group, "a new exchange");
  const nb::gil_scoped_release others_run;
  check_options(options);
  return make_shared_unlocked<RankExchange>(group, options);
}

nb::dict arrived_of(nb::handle self) {
  const auto& exchange = nb::cast<const RankExchange&>(self);
  return fields_of(exchange.arrived(), exchange.options(), exchange.experts().size(),
                   [self](const auto* data, std::initializer_list<std::size_t> sizes) { return view_of(data, sizes, self); });
}

}  // namespace

ExchangeOptions exchange_options_of(nb::handle given, int ranks) {
  ExchangeOptions options;
  options.way = value_of(ways(), given.attr("way"), "way");
  options.hidden = field<int>(given, "hidden");
  options.topk = field<int>(given, "topk");
  options.cap = field<int>(given, "cap");
  LayerShape shape;
  shape.experts = field<int>(given, "experts");
  options.placement = placement_of(given.attr("placement"), shape, ranks);
  options.wire = value_of(tool::wires, given.attr("wire"), "wire");
  options.combine_wire = value_of(tool::wires, given.attr("combine_wire"), "combine_wire");
  options.quantisation = quantisation_of(given.attr("quantisation"));
  const nb::object arrived = given.attr("arrived");
  options.arrived = arrived.is_none() ? default_layout(options.way) : value_of(layouts(), arrived, "arrived");
  options.weight_at = value_of(tool::weight_places, given.attr("weight_at"), "weight_at");
  options.reduce = value_of(tool::reduces, given.attr("reduce"), "reduce");
  options.cpu_sync = field<bool>(given, "cpu_sync");
  options.workers = field<int>(given, "workers");
  return options;
}

void bind_exchange(nb::module_& module) {
  nb::class_<RankExchange>(module, "RankExchange")
      .def(nb::new_(&make_exchange), "group"_a, "options"_a)
      .def("dispatch", &RankExchange::dispatch, "hidden"_a, "ids"_a, "weights"_a, "step"_a.none())
      .def("combine", &RankExchange::combine, "results"_a, "out"_a.none())
      .def("reset", &RankExchange::reset, "live"_a.none())
      .def("close", &RankExchange::close)
      .def_prop_ro("arrived", [](const nb::object& self) { return arrived_of(self); })
      .def_prop_ro("experts", &RankExchange::experts)
      .def_prop_ro("bytes", &RankExchange::bytes);
}

}  // namespace heddle::python
