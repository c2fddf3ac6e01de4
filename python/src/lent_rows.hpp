// Rows of tokens that Python lends to experts, and how these compute.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <vector>

#include "arrays.hpp"
#include "heddle/error.hpp"
#include "heddle/experts.hpp"
#include "heddle/layer.hpp"

namespace heddle::python {

/// How the codes of fp8 rows come.
enum class Codes : std::uint8_t { bytes, widened };  ///< widened: to bf16

/// Rows [.., columns], bf16, or the codes of fp8 with a scale a group, in host memory or on a GPU.
class LentRows {
 public:
  /// scale_unit: bytes that a row's scales are padded to a multiple of. Throws InputError as Lent does.
  LentRows(nb::handle rows, nb::handle scales, std::vector<Size> sizes, const Quantisation& quantisation,
           std::optional<int> gpu = {}, std::int64_t scale_unit = 1, Codes codes = Codes::bytes)
      : is_wide_(scales.is_none() || codes == Codes::widened),
        values_(rows, {"rows", is_wide_ ? Element::bf16 : Element::uint8, sizes, Access::read, gpu, gpu ? row_alignment : 1}),
        columns_(values_.size(sizes.size() - 1)) {
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) count_ *= values_.size(i);
    if (scales.is_none()) return;
    if (quantisation.group != 128 && quantisation.group != 32)
      throw InputError(fmt::format("rows with a scale a group of {}; 128 and 32 are supported", quantisation.group));
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) sizes[i] = values_.size(i);
    const bool is_f32 = quantisation.scale == ScaleFormat::f32;
    const std::int64_t scale_bytes = is_f32 ? 4 : 1, groups = (columns_ + quantisation.group - 1) / quantisation.group;
    const std::int64_t row_bytes = (groups * scale_bytes + scale_unit - 1) / scale_unit * scale_unit;
    sizes.back() = row_bytes / scale_bytes;
    scales_.emplace(scales, Wanted{"scales", is_f32 ? Element::float32 : Element::uint8, sizes, Access::read, gpu});
    scale_stride_ = static_cast<std::size_t>(row_bytes);
  }

  std::int64_t size(std::size_t dimension) const { return values_.size(dimension); }
  RowView view() const {
    const std::size_t stride = static_cast<std::size_t>(columns_) * (is_wide_ ? 2 : 1);
    const int rows = static_cast<int>(count_);
    if (!scales_) return {Activation::bf16, values_.data<const std::byte>(), stride, nullptr, 0, rows};
    return {Activation::fp8, values_.data<const std::byte>(), stride, scales_->data<const std::byte>(), scale_stride_, rows};
  }

 private:
  bool is_wide_;  ///< two bytes a value
  Lent values_;
  std::int64_t columns_;
  std::int64_t count_ = 1;  ///< of rows
  std::optional<Lent> scales_;
  std::size_t scale_stride_ = 0;
};

/// heddle.ExpertOptions. Where it has None: what the weights' kind and shape say.
ExpertOptions expert_options_of(nb::handle given, const LayerWeights& weights);

/// Of what a rank holds: a slice with tensor-parallel experts.
int intermediate_of(const LayerWeights& weights);

}  // namespace heddle::python
