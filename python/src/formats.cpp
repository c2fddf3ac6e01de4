// Group quantisation as the wires and the products use it.
#include "arrays.hpp"
#include "formats/rows.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

struct Fp8Arrays {
  Lent rows, codes, scales;
  Quantisation quantisation;
  std::size_t count;
  int columns;
  std::size_t scale_bytes;  ///< of a row
};

Fp8Arrays take(nb::handle rows, nb::handle codes, nb::handle scales, nb::handle given, Access rows_access, Access codes_access) {
  const Quantisation quantisation = quantisation_of(given);
  Lent values(rows, {"rows", Element::float32, {"rows", "columns"}, rows_access});
  const std::int64_t count = values.size(0), columns = values.size(1);
  check_row_format({Wire::fp8, static_cast<int>(columns), quantisation, 1.0f});
  const std::int64_t groups = (columns + quantisation.group - 1) / quantisation.group;
  const bool bytes = quantisation.scale == ScaleFormat::ue8m0;
  return {std::move(values),
          Lent(codes, {"codes", Element::uint8, {count, columns}, codes_access}),
          Lent(scales, {"scales", bytes ? Element::uint8 : Element::float32, {count, groups}, codes_access}),
          quantisation,
          static_cast<std::size_t>(count),
          static_cast<int>(columns),
          static_cast<std::size_t>(groups) * (bytes ? 1 : sizeof(float))};
}

void quantise_into(nb::handle rows, nb::handle codes, nb::handle scales, nb::handle quantisation) {
  const Fp8Arrays a = take(rows, codes, scales, quantisation, Access::read, Access::write);
  const nb::gil_scoped_release others_run;
  for (std::size_t row = 0; row < a.count; ++row) {
    const std::size_t first = row * static_cast<std::size_t>(a.columns);
    quantise_fp8(a.rows.data<const float>() + first, a.columns, a.quantisation, a.codes.data<std::uint8_t>() + first,
                 a.scales.data<std::byte>() + row * a.scale_bytes);
  }
}

void widen_into(nb::handle codes, nb::handle scales, nb::handle rows, nb::handle quantisation) {
  const Fp8Arrays a = take(rows, codes, scales, quantisation, Access::write, Access::read);
  const nb::gil_scoped_release others_run;
  for (std::size_t row = 0; row < a.count; ++row) {
    const std::size_t first = row * static_cast<std::size_t>(a.columns);
    widen_fp8(a.codes.data<const std::uint8_t>() + first, a.scales.data<const std::byte>() + row * a.scale_bytes, a.columns,
              a.quantisation, a.rows.data<float>() + first);
  }
}

}  // namespace

void bind_formats(nb::module_& module) {
  module.def("quantise_fp8_into", &quantise_into, "rows"_a, "codes"_a, "scales"_a, "quantisation"_a);
  module.def("widen_fp8_into", &widen_into, "codes"_a, "scales"_a, "rows"_a, "quantisation"_a);
}

}  // namespace heddle::python
