// The experts of one rank: weight matrices as checkpoints store them, the rows that arrive in one
// of three layouts, and the runners over them (exchange-ways article, section 1.5).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heddle/formats.hpp"
#include "heddle/shape.hpp"

namespace heddle {

/// One weight matrix [rows, cols] row-major; cols is summed (N and K of NUMERICS). A view: the
/// owner (a mapped checkpoint) must outlive it.
struct WeightMatrix {
  WeightKind kind = WeightKind::bf16;
  int rows = 0;
  int cols = 0;
  std::span<const std::byte> values;  ///< bf16: 2 bytes a value; fp8_block, mxfp8: 1; mxfp4, nvfp4: two a byte, even index low
  std::span<const std::byte> scales;  ///< fp8_block: f32 (or ue8m0) [ceil(rows/128), ceil(cols/128)]; mxfp4, mxfp8: ue8m0 [rows, cols/32]; nvfp4: e4m3 [rows, cols/16]
  ScaleFormat block_scale = ScaleFormat::f32;  ///< fp8_block only: how `scales` are stored
  float tensor_scale = 1.0f;          ///< nvfp4: multiplied; 1 elsewhere
};

/// The three matrices of one expert: gate and up [D, H], down [H, D].
struct ExpertWeights {
  WeightMatrix gate;
  WeightMatrix up;
  WeightMatrix down;
};

/// Widens columns [begin, end) of one row of a weight matrix exactly to f32, scales included except
/// nvfp4's tensor scale and fp8_block's block scales, which apply at promotion.
/// Declared for tests and tools; the tile engine has a faster path with the same values.
void widen_row(const WeightMatrix& weights, int row, int begin, int end, float* out);

/// The promotion scale of (row, 128-column step): fp8_block's block scale, nvfp4's tensor scale, 1 elsewhere.
float promotion_scale(const WeightMatrix& weights, int row, int step);

/// How arrived rows are arranged (exchange-ways article, Figure 4).
enum class ArrivedLayout : std::uint8_t { contiguous, masked, routed };

/// Which runner computes them; automatic takes the one the way's layout wants.
enum class RunnerKind : std::uint8_t { automatic, contiguous, masked, routed };

/// Everything about the arithmetic of one pair that is not a weight.
struct ExpertOptions {
  Activation activation = Activation::fp8;
  Quantisation quantisation;
  std::optional<float> clamp;
  WeightAt weight_at = WeightAt::activation;
  int row_block = 0;  ///< rows a GEMM tile; 0: chosen from the count. Never changes a bit.
};

/// Rows as the GEMMs take them, in one of two forms. Row r of `fp8` is at values + r * value_stride,
/// its scales at scales + r * scale_stride; with bf16 only `values` is used. Wire rows in a heap and
/// packed tensors are both views of this kind.
struct RowView {
  Activation format = Activation::bf16;
  const std::byte* values = nullptr;
  std::size_t value_stride = 0;
  const std::byte* scales = nullptr;
  std::size_t scale_stride = 0;
};

}  // namespace heddle
