// The loops around the BLAS call: widening, promotion, rounding. Compiled for several instruction sets
// from one source; every version gives the same bits, since each operation is exact or correctly rounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "heddle/experts.hpp"

namespace heddle {

struct TileKernels {
  std::string_view name;

  /// Rows [first, first + rows) and columns [begin, begin + count) of a weight matrix, exactly, into out
  /// with tile::step floats a row. begin is a multiple of 32; count is even.
  void (*widen_weights)(const WeightMatrix& weights, int first, int rows, int begin, int count, float* out);

  /// e4m3 or bf16 values to f32.
  void (*widen_e4m3)(const std::byte* in, int count, float* out);
  void (*widen_bf16)(const std::byte* in, int count, float* out);

  /// sum = fma(partial, scale, sum), element by element.
  void (*promote)(const float* partial, float scale, int count, float* sum);

  /// Rounds to bf16.
  void (*round)(const float* in, int count, bf16* out);
};

/// The fastest version this machine can run. Under sanitizers the baseline alone.
const TileKernels& tile_kernels();

/// Every version this machine can run, the baseline first: for tests.
std::span<const TileKernels> all_tile_kernels();

}  // namespace heddle
