// The activation step between the GEMMs, on the host: clamp, SwiGLU, routing weight, quantisation, for
// every real row, under either grid. The grids give the same bits; they differ in what they launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "experts/activation/flat_list.hpp"
#include "heddle/experts.hpp"

namespace heddle {

/// One activation step. Buffers have a row for each flat row (block_rows = 0), or block_rows for each
/// expert, of which the first masked_m[e] are real; other rows are neither read nor written.
struct ActivationStep {
  int intermediate = 0;            ///< D
  const bf16* gate_up = nullptr;   ///< [rows, 2 D]: the gate half, then the up half
  const float* weights = nullptr;  ///< one a row; null: 1
  int block_rows = 0;
  std::optional<float> clamp;
  Activation format = Activation::fp8;
  Quantisation quantisation;
  std::byte* values = nullptr;  ///< [rows, D] e4m3 or bf16
  std::byte* scales = nullptr;  ///< [rows, scale_bytes()], fp8 only

  std::size_t value_bytes() const;
  std::size_t scale_bytes() const;
  /// What was written, as the rows of GEMM 2.
  RowView view() const;
};

/// The row itself: the same whichever block computes it.
void activate_row(const ActivationStep& step, const FlatRow& row);

/// What a grid launched and found.
struct GridCounts {
  std::int64_t blocks = 0;
  std::int64_t empty = 0;  ///< blocks without a row
  std::int64_t scans = 0;  ///< prefix sums: every block computes its own
  std::int64_t rows = 0;
};

/// One block for each of the most_rows = T x topk rows there can be. Throws InputError if masked_m sums to more.
GridCounts run_padded(const ActivationStep& step, std::span<const int> masked_m, int most_rows);

/// min(slots, most_rows) blocks that loop over the rows there are. Throws InputError as above, and unless slots >= 1.
GridCounts run_persistent(const ActivationStep& step, std::span<const int> masked_m, int slots, int most_rows);

}  // namespace heddle
