// What exchanges on the host engine and on GPUs have in common.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "arrays.hpp"
#include "heddle/exchange.hpp"
#include "options.hpp"

namespace heddle::python {

/// From heddle.exchange.ExchangeOptions, for experts on so many ranks.
ExchangeOptions exchange_options_of(nb::handle given, int ranks);

/// Of results that combine takes for what arrived.
inline std::vector<Size> result_sizes(const Arrived& arrived, const ExchangeOptions& options) {
  if (arrived.slots_wanted) return {arrived.room, options.topk, options.hidden};
  return {arrived.room, options.hidden};
}

/// The fields of heddle.exchange.Arrived that the library knows; view(data, {sizes}): an array over memory of the exchange, None
/// where there is none.
template <class View>
nb::dict fields_of(const Arrived& arrived, const ExchangeOptions& options, std::size_t experts, View&& view) {
  const auto room = static_cast<std::size_t>(arrived.room), topk = static_cast<std::size_t>(options.topk);
  const bool routed = arrived.layout == ArrivedLayout::routed;
  const auto where = [&](bool there, const auto* data, std::initializer_list<std::size_t> sizes) {
    return there ? nb::object(view(data, sizes)) : nb::object(nb::none());
  };
  const auto known = [](int count) { return count < 0 ? nb::object(nb::none()) : nb::object(nb::int_(count)); };
  nb::dict fields;
  fields["layout"] = tool::word_of(layouts(), arrived.layout);
  fields["wire"] = tool::word_of(tool::wires, arrived.wire);
  fields["rows"] = view(reinterpret_cast<const std::uint8_t*>(arrived.rows), {room, arrived.row_stride});
  fields["received"] = known(arrived.received);
  fields["real"] = known(arrived.real);
  fields["host_waited"] = arrived.host_waited;
  fields["begins"] = where(!routed, arrived.begins, {experts});
  fields["counts"] = where(!routed, arrived.counts, {experts});
  fields["row_weights"] = where(!routed, arrived.row_weights, {room});
  fields["local_ids"] = where(routed, arrived.local_ids, {room, topk});
  fields["weights"] = where(routed, arrived.weights, {room, topk});
  fields["slots_wanted"] = arrived.slots_wanted;
  return fields;
}

}  // namespace heddle::python
