#include "experts/row_view.hpp"

namespace heddle {

RowFormat activation_format(int hidden, Activation activation, const Quantisation& quantisation) {
  return {activation == Activation::fp8 ? Wire::fp8 : Wire::bf16, hidden, quantisation, 1.0f};
}

bool enters_as_it_is(const RowFormat& wire, const RowFormat& activation) {
  return wire.wire == Wire::bf16 || same_bytes(wire, activation);
}

RowView view_of(const std::byte* rows, std::size_t stride, const RowFormat& format) {
  RowView view;
  view.format = format.wire == Wire::fp8 ? Activation::fp8 : Activation::bf16;
  view.values = rows;
  view.value_stride = stride;
  view.scales = rows + format.scale_offset();
  view.scale_stride = stride;
  return view;
}

}  // namespace heddle
