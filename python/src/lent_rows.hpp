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

/// Rows [.., columns], bf16, or the bytes of fp8 with a scale a group, in host memory or on a GPU.
class LentRows {
 public:
  /// Throws InputError as Lent does.
  LentRows(nb::handle rows, nb::handle scales, std::vector<Size> sizes, const Quantisation& quantisation,
           std::optional<int> gpu = {}, std::size_t alignment = 1)
      : values_(rows, {"rows", scales.is_none() ? Element::bf16 : Element::uint8, sizes, Access::read, gpu, alignment}),
        columns_(values_.size(sizes.size() - 1)) {
    if (scales.is_none()) return;
    if (quantisation.group != 128 && quantisation.group != 32)
      throw InputError(fmt::format("rows with a scale a group of {}; 128 and 32 are supported", quantisation.group));
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) sizes[i] = values_.size(i);
    sizes.back() = (columns_ + quantisation.group - 1) / quantisation.group;
    const bool is_wide = quantisation.scale == ScaleFormat::f32;
    scales_.emplace(scales, Wanted{"scales", is_wide ? Element::float32 : Element::uint8, sizes, Access::read, gpu});
    scale_stride_ = static_cast<std::size_t>(sizes.back().number * (is_wide ? 4 : 1));
  }

  std::int64_t size(std::size_t dimension) const { return values_.size(dimension); }
  RowView view() const {
    const auto columns = static_cast<std::size_t>(columns_);
    if (!scales_) return {Activation::bf16, values_.data<const std::byte>(), 2 * columns};
    return {Activation::fp8, values_.data<const std::byte>(), columns, scales_->data<const std::byte>(), scale_stride_};
  }

 private:
  Lent values_;
  std::int64_t columns_;
  std::optional<Lent> scales_;
  std::size_t scale_stride_ = 0;
};

/// heddle.ExpertOptions. Where it has None: what the weights' kind and shape say.
ExpertOptions expert_options_of(nb::handle given, const LayerWeights& weights);

}  // namespace heddle::python
