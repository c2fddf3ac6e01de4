#include "matrices.hpp"

#include <fmt/format.h>

#include <string>

#include "heddle/error.hpp"

namespace heddle::python {

namespace {

constexpr int block = 128;  // rows and columns that share a scale of fp8_block
constexpr int group = 32;   // columns that share a scale of mxfp4 and mxfp8

int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }

Element element_of(WeightKind kind) {
  if (kind == WeightKind::nvfp4) throw InputError("weights in arrays are of kind bf16, fp8_block, mxfp4 or mxfp8, not nvfp4");
  return kind == WeightKind::bf16 ? Element::bf16 : Element::uint8;
}

std::optional<Lent> lend_scales(const std::string& name, WeightKind kind, nb::handle scales, std::int64_t count, int rows,
                                int cols) {
  if (kind == WeightKind::bf16) {
    if (!scales.is_none()) throw InputError(name + ": bf16 weights have none, got some");
    return std::nullopt;
  }
  if (scales.is_none()) throw InputError(name + ": expected those of quantised weights, got None");
  if (kind == WeightKind::fp8_block)
    return Lent(scales, {name.c_str(), Element::float32, {count, ceil_div(rows, block), ceil_div(cols, block)}});
  return Lent(scales, {name.c_str(), Element::uint8, {count, rows, ceil_div(cols, group)}});
}

}  // namespace

MatrixStack::MatrixStack(const std::string& name, WeightKind kind, nb::handle values, nb::handle scales)
    : kind_(kind),
      values_(values, {name.c_str(), element_of(kind), {"experts", "rows", "columns"}}),
      cols_(static_cast<int>(values_.size(2)) * (kind == WeightKind::mxfp4 ? 2 : 1)),
      scales_(lend_scales(name + " scales", kind, scales, values_.size(0), rows(), cols_)) {}

std::vector<WeightMatrix> MatrixStack::matrices() const {
  std::vector<WeightMatrix> all;
  for (int index = 0; index < count(); ++index) all.push_back(matrix(index));
  return all;
}

WeightMatrix MatrixStack::part(int index, int first, int rows) const {
  const auto bytes = [](std::int64_t from, std::int64_t count, const std::byte* data) {
    return std::span(data + from, static_cast<std::size_t>(count));
  };
  const std::int64_t row_bytes = values_.size(2) * (kind_ == WeightKind::bf16 ? 2 : 1);
  const std::int64_t first_row = std::int64_t{index} * this->rows() + first;
  WeightMatrix matrix{kind_, rows, cols_, bytes(first_row * row_bytes, rows * row_bytes, values_.data<const std::byte>()), {}};
  if (!scales_) return matrix;
  const bool blocks = kind_ == WeightKind::fp8_block;
  if (blocks && first % block != 0) throw InputError(fmt::format("fp8 blocks of {} rows cannot be cut at row {}", block, first));
  const std::int64_t line = scales_->size(2) * (blocks ? 4 : 1);
  const std::int64_t first_line = index * scales_->size(1) + (blocks ? first / block : first);
  matrix.scales = bytes(first_line * line, (blocks ? ceil_div(rows, block) : rows) * line, scales_->data<const std::byte>());
  return matrix;
}

}  // namespace heddle::python
