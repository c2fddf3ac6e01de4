// One value of the activation step, one source for host and device (docs/numerics.md, steps 3 and 4).
#pragma once

#include <cmath>

#include "formats/group.hpp"
#include "heddle/formats.hpp"

namespace heddle {

/// The clamp of gate and up; `limited` false: none. NaN passes.
struct SwigluClamp {
  bool limited = false;
  float limit = 0.0f;

  HEDDLE_HOST_DEVICE float gate(float value) const { return limited && value > limit ? limit : value; }
  HEDDLE_HOST_DEVICE float up(float value) const {
    const float below = limited && value > limit ? limit : value;
    return limited && below < -limit ? -limit : below;
  }
};

/// g / (1 + exp(-g)), the division correctly rounded.
HEDDLE_HOST_DEVICE inline float silu(float gate) { return detail::divide(gate, 1.0f + std::exp(-gate)); }

/// g / (1 + exp(-g)) * u in f32, of the bf16 results of GEMM 1.
HEDDLE_HOST_DEVICE inline float swiglu(bf16 gate, bf16 up, const SwigluClamp& clamp) {
  return silu(clamp.gate(to_float(gate))) * clamp.up(to_float(up));
}

}  // namespace heddle
