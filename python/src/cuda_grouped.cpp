// Grouped products on a GPU. Calls queue kernels on the caller's stream; what they are given stays with the caller until these
// have run.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "experts/sm90/cuda_grouped.hpp"
#include "lent_rows.hpp"
#include "matrices.hpp"
#include "options.hpp"
#include "rooms.hpp"

using namespace nanobind::literals;

namespace heddle::python {

namespace {

constexpr int word_bytes = 4;  // ue8m0 scales of a row are padded to

/// Rows [.., K], their scales and results [.., N] of one call, lent until it returns.
class Operands {
 public:
  /// sizes: of all dimensions but the last.
  Operands(const sm90::GroupedProduct& product, int gpu, std::vector<Size> sizes, nb::handle rows, nb::handle scales,
           const Quantisation& quantisation, nb::handle out)
      : rows_(rows, scales, with(sizes, product.cols()), quantisation, gpu, word_bytes,
              product.takes_wide_codes() ? Codes::widened : Codes::bytes) {
    for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = rows_.size(i);
    const Lent results(out, {"out", Element::bf16, with(sizes, product.rows()), Access::write, gpu, row_alignment});
    call_.out.values = results.data<bf16>();
    call_.rows = rows_.view();
    if (!scales.is_none()) call_.quantisation = quantisation;
  }
  std::int64_t size(std::size_t dimension) const { return rows_.size(dimension); }
  sm90::GroupedRows call(int expected_rows) const {
    sm90::GroupedRows out = call_;
    out.expected_rows = expected_rows;
    return out;
  }

 private:
  static std::vector<Size> with(std::vector<Size> sizes, int last) {
    sizes.emplace_back(last);
    return sizes;
  }
  LentRows rows_;
  sm90::GroupedRows call_;
};

class RankGroupedProduct {
 public:
  RankGroupedProduct(const std::vector<WeightMatrix>& weights, int device, int most_rows)
      : gpu_(device), product_(weights, {device, most_rows, DeviceRowBlocks::automatic}) {}

  void contiguous(nb::handle rows, nb::handle scales, nb::handle quantisation, nb::handle groups, bool zeroes, nb::handle out,
                  int expected_rows, std::uintptr_t stream) {
    const Operands operands = lend({"rows"}, rows, scales, quantisation, out);
    const Lent group_of = lend_layout(groups, "groups", operands.size(0));
    const nb::gil_scoped_release others_run;
    product_.contiguous(operands.call(expected_rows), group_of.data<const std::int32_t>(), nobodys(zeroes), stream_of(stream));
  }
  void ended(nb::handle rows, nb::handle scales, nb::handle quantisation, nb::handle given, int alignment, bool zeroes,
             nb::handle out, int expected_rows, std::uintptr_t stream) {
    const Operands operands = lend({"rows"}, rows, scales, quantisation, out);
    const Lent ends = lend_layout(given, "ends", product_.groups());
    const nb::gil_scoped_release others_run;
    product_.ended(operands.call(expected_rows), ends.data<const std::int32_t>(), alignment, nobodys(zeroes), stream_of(stream));
  }
  void masked(nb::handle rows, nb::handle scales, nb::handle quantisation, nb::handle given, nb::handle out, int expected_rows,
              std::uintptr_t stream) {
    const Operands operands = lend({product_.groups(), "rows"}, rows, scales, quantisation, out);
    const Lent counts = lend_layout(given, "counts", product_.groups());
    const nb::gil_scoped_release others_run;
    product_.masked(operands.call(expected_rows), counts.data<const std::int32_t>(), stream_of(stream));
  }
  void throw_if_failed() { product_.throw_if_failed(); }
  std::size_t weight_bytes() const { return product_.weight_bytes(); }

 private:
  static DeviceStream stream_of(std::uintptr_t stream) { return reinterpret_cast<DeviceStream>(stream); }
  static sm90::NobodysRows nobodys(bool zeroes) { return zeroes ? sm90::NobodysRows::zeroed : sm90::NobodysRows::left; }
  Operands lend(std::vector<Size> sizes, nb::handle rows, nb::handle scales, nb::handle quantisation, nb::handle out) const {
    return {product_, gpu_, std::move(sizes), rows, scales, quantisation_of(quantisation), out};
  }
  Lent lend_layout(nb::handle given, const char* name, std::int64_t count) const {
    return {given, {name, Element::int32, {count}, Access::read, gpu_}};
  }

  int gpu_;
  sm90::GroupedProduct product_;
};

std::shared_ptr<RankGroupedProduct> make_product(nb::handle kind, nb::handle weights, nb::handle weight_scales, int device,
                                                 int most_rows) {
  const MatrixStack stack("weights", value_of(tool::kinds, kind, "kind"), weights, weight_scales);
  const std::vector<WeightMatrix> matrices = stack.matrices();
  const nb::gil_scoped_release others_run;
  return std::make_shared<RankGroupedProduct>(matrices, device, most_rows);
}

}  // namespace

void bind_grouped_product(nb::module_& module) {
  nb::class_<RankGroupedProduct>(module, "RankGroupedProduct")
      .def(nb::new_(&make_product), "kind"_a, "weights"_a, "weight_scales"_a.none(), "device"_a, "most_rows"_a)
      .def("contiguous", &RankGroupedProduct::contiguous, "rows"_a, "scales"_a.none(), "quantisation"_a, "groups"_a, "zeroes"_a,
           "out"_a, "expected_rows"_a, "stream"_a)
      .def("ended", &RankGroupedProduct::ended, "rows"_a, "scales"_a.none(), "quantisation"_a, "ends"_a, "alignment"_a, "zeroes"_a,
           "out"_a, "expected_rows"_a, "stream"_a)
      .def("masked", &RankGroupedProduct::masked, "rows"_a, "scales"_a.none(), "quantisation"_a, "counts"_a, "out"_a,
           "expected_rows"_a, "stream"_a)
      .def("throw_if_failed", &RankGroupedProduct::throw_if_failed)
      .def_prop_ro("weight_bytes", &RankGroupedProduct::weight_bytes);
}

}  // namespace heddle::python
