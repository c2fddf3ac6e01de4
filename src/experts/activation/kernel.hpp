// The activation kernel as the host part launches it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/activation/clamp.hpp"
#include "experts/activation/scale_layout.hpp"
#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

constexpr int most_activation_experts = 1024;
constexpr int most_activation_threads = 1024;
/// A thread computes so many neighbouring columns: one load of 16 bytes of the gate half, one of the up half.
constexpr int activation_columns = 8;

/// What the kernel is given: a DeviceActivation, checked and worked out.
struct ActivationCall {
  const std::byte* gate_up = nullptr;
  const int* counts = nullptr;
  const int* row_begin = nullptr;
  const float* weights = nullptr;
  std::byte* values = nullptr;
  std::byte* scales = nullptr;
  int experts = 0;
  int intermediate = 0;
  int block_rows = 0;
  int most_count = 0;  ///< of one expert
  int most_rows = 0;
  DeviceClamp clamp;
  int group = 128;
  ScaleLayout scale_layout;
  unsigned scale_row_stride = 0;  ///< that of the layout
};

/// The kernel of a format: a __global__ function of one ActivationCall. `scale` matters for fp8.
const void* activation_kernel(Activation format, ScaleFormat scale);

}  // namespace heddle
