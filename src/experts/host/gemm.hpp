// The tile engine: one GEMM of one expert, on one BLAS thread. All runners come here.
#pragma once

#include <cstddef>

#include "experts/host/operand.hpp"
#include "experts/host/scratch.hpp"
#include "heddle/experts.hpp"

namespace heddle {

/// Where result row i goes: to values + row_of(i) * stride, row_of being `rows[i]`, or i without `rows`.
struct GemmOutput {
  bf16* values = nullptr;
  std::size_t stride = 0;
  const int* rows = nullptr;
};

/// Tells OpenBLAS, once and for the whole process, to use the calling thread alone.
void use_one_blas_thread();

/// out[i, n] = bf16(sum over K in steps of 128 from +0: sum = fma(partial, s_row * s_weight, sum)), the
/// partial being BLAS's f32 product of the widened operands over the step (over 32 columns where
/// activations have groups of 32: four promotions a step). Holds the scratch of one thread.
class TileEngine {
 public:
  /// rows [count, K] times weights [N, K]; a weight tile is widened once for all of them. row_block as
  /// in ExpertOptions. Returns the row blocks.
  int multiply(const Operand& rows, const WeightMatrix& weights, int row_block, const GemmOutput& out);

 private:
  struct Columns;  // one tile of weight rows
  void widen(const WeightMatrix& weights, const Columns& columns, int step);
  void accumulate(const Operand& rows, const WeightMatrix& weights, const Columns& columns, int step, int first, int count,
                  float* sums);

  Scratch<float> weights_;  // [guard + width + guard, 128]
  Scratch<float> partial_;  // [block, guard + width + guard]
  Scratch<float> sums_;     // [count, width]
};

}  // namespace heddle
