// Rows on the wire: quantising, widening, and from one format to another, on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/row_format.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// Throws InputError unless a format can be written: hidden >= 1, fp8 groups of 128 or 32, a global
/// scale that is positive and finite. The functions below do not check again.
void check_row_format(const RowFormat& format);

/// Writes format.row_bytes() bytes, padding (as zeros) included, from values [format.hidden].
/// A bf16 row from bf16 values is a copy.
void quantise_row(const bf16* in, const RowFormat& format, std::byte* out);
void quantise_row(const float* in, const RowFormat& format, std::byte* out);

/// The values [format.hidden] of a row as f32.
void widen_row(const std::byte* row, const RowFormat& format, float* out);

/// From one format to another of the same hidden size: widened, then quantised by the rules of `to`;
/// where both give the same bytes, a copy. `in` and `out` do not overlap.
void convert_row(const std::byte* in, const RowFormat& from, std::byte* out, const RowFormat& to);

/// The fp8 rules without a row around them: e4m3 codes [count] and one scale a group, packed
/// (ceil(count / group) bytes or f32s), for activations that are quantised again between the GEMMs.
void quantise_fp8(const float* in, int count, const Quantisation& quantisation, std::uint8_t* values, std::byte* scales);

/// Back to f32: values [count] times the scale of their group.
void widen_fp8(const std::uint8_t* values, const std::byte* scales, int count, const Quantisation& quantisation, float* out);

}  // namespace heddle
