// Wire rows as the GEMMs see them.
#pragma once

#include "formats/row_format.hpp"
#include "heddle/experts.hpp"

namespace heddle {

/// The format in which rows enter the GEMMs.
RowFormat activation_format(int hidden, Activation activation, const Quantisation& quantisation);

/// Can rows of this wire enter the GEMMs as they are? bf16 always: the runner quantises them itself.
bool enters_as_it_is(const RowFormat& wire, const RowFormat& activation);

/// A view of rows of `format`, `stride` bytes apart.
RowView view_of(const std::byte* rows, std::size_t stride, const RowFormat& format);

}  // namespace heddle
