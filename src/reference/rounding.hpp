// The places where the reference rounds: bf16 results, and rows that go through a group
// quantisation. Each function gives what the reader of the rounded row sees, as exact doubles.
#pragma once

#include <span>

#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle::reference {

/// Nearest bf16 to a double, ties to even, in one rounding (by way of f32 there would be two).
bf16 round_to_bf16(double value);

/// out[i] = the value of the e4m3 code of values[i] under its group's scale.
void round_to_fp8(std::span<const float> values, const Quantisation& quantisation, std::span<double> out);

/// out[i] = the f32 value of the e2m1 code of values[i] under its group's e4m3 scale and the global scale.
void round_to_nvfp4(std::span<const float> values, float global_scale, std::span<float> out);

/// A row as a GEMM takes it: group-quantised, or rounded to bf16.
void round_to_operand(std::span<const float> values, Activation activation, const Quantisation& quantisation,
                      std::span<double> out);

}  // namespace heddle::reference
