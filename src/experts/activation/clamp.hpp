// The clamp as kernels take it: worked out once on the host.
#pragma once

#include <cstdint>
#include <optional>

#include "heddle/formats.hpp"

namespace heddle {

/// None; on bf16 values two at a time, where the limit is a bf16 value; or on f32 values one by one.
enum class ClampKind : std::uint8_t { none, pairs, wide };

struct DeviceClamp {
  ClampKind kind = ClampKind::none;
  float limit = 0.0f;
  std::uint32_t most = 0, least = 0;  ///< limit and -limit as pairs of bf16

  static DeviceClamp of(std::optional<float> limit) {
    if (!limit.has_value()) return {};
    const bf16 narrow = to_bf16(*limit);
    const std::uint32_t pair = narrow.bits | static_cast<std::uint32_t>(narrow.bits) << 16;
    return {to_float(narrow) == *limit ? ClampKind::pairs : ClampKind::wide, *limit, pair, pair | 0x80008000u};
  }
};

}  // namespace heddle
