#include "layer/arrived_rows.hpp"

#include <algorithm>

#include "formats/rows.hpp"

namespace heddle {

ActivationRows::ActivationRows(int hidden, int topk, int local_experts, Wire wire, Activation activation,
                               const Quantisation& quantisation)
    : topk_(topk),
      local_experts_(local_experts),
      wire_{wire, hidden, quantisation, 1.0f},
      format_(activation_format(hidden, activation, quantisation)) {}

template <class Visit>
void ActivationRows::for_real_rows(const Arrived& arrived, Visit visit) const {
  if (arrived.layout == ArrivedLayout::routed) {
    for (int row = 0; row < arrived.room; ++row) {
      const std::int32_t* ids = arrived.local_ids + static_cast<std::ptrdiff_t>(row) * topk_;
      if (std::any_of(ids, ids + topk_, [](std::int32_t id) { return id >= 0; })) visit(static_cast<std::size_t>(row));
    }
    return;
  }
  for (int e = 0; e < local_experts_; ++e) {
    for (int i = 0; i < arrived.counts[e]; ++i) visit(static_cast<std::size_t>(arrived.begins[e] + i));
  }
}

void ActivationRows::reserve(std::size_t rows) {
  if (rows <= room_) return;
  buffer_ = Array<std::byte>(rows * format_.row_bytes());
  room_ = rows;
}

RowView ActivationRows::prepare(const Arrived& arrived, const bf16* own, int own_rows, std::size_t own_begin) {
  if (enters_as_it_is(wire_, format_) && own == nullptr) return view_of(arrived.rows, arrived.row_stride, wire_);
  const std::size_t stride = format_.row_bytes();
  reserve(std::max(static_cast<std::size_t>(arrived.room), own_begin + static_cast<std::size_t>(own_rows)));
  for_real_rows(arrived, [&](std::size_t row) {
    convert_row(arrived.rows + row * arrived.row_stride, wire_, buffer_.data() + row * stride, format_);
  });
  for (int i = 0; own != nullptr && i < own_rows; ++i) {
    const auto row = static_cast<std::size_t>(i);
    quantise_row(own + row * static_cast<std::size_t>(format_.hidden), format_, buffer_.data() + (own_begin + row) * stride);
  }
  return view_of(buffer_.data(), stride, format_);
}

}  // namespace heddle
