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

/// One weight matrix [rows, cols] row-major; cols is summed (N and K of docs/numerics.md). A view: the
/// owner (a mapped checkpoint) must outlive it. Nothing needs to be aligned.
struct WeightMatrix {
  WeightKind kind = WeightKind::bf16;
  int rows = 0;
  int cols = 0;
  /// bf16: 2 bytes a value; fp8_block, mxfp8: 1; mxfp4, nvfp4: two values a byte, even index low.
  std::span<const std::byte> values;
  /// fp8_block: f32 (or ue8m0) [ceil(rows/128), ceil(cols/128)]; mxfp4, mxfp8: ue8m0 [rows, ceil(cols/32)];
  /// nvfp4: e4m3 [rows, ceil(cols/16)]; bf16: empty.
  std::span<const std::byte> scales;
  ScaleFormat block_scale = ScaleFormat::f32;  ///< fp8_block only: how `scales` are stored
  float tensor_scale = 1.0f;                   ///< nvfp4: multiplied; 1 elsewhere
};

/// The three matrices of one expert: gate and up [D, H], down [H, D].
struct ExpertWeights {
  WeightMatrix gate;
  WeightMatrix up;
  WeightMatrix down;
};

/// Throws InputError unless the matrix is [rows, cols] and its spans have the sizes of its kind.
/// `name` is what the message calls it, e.g. "expert 3, gate".
void check_weights(const WeightMatrix& weights, int rows, int cols, const std::string& name);

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

/// How the activation step maps blocks to rows: a block for every possible row, or a block for every
/// slot of the machine that loops over the rows there are (persistent-grid article). Same bits.
enum class ActivationGrid : std::uint8_t { padded, persistent };

/// Everything about the arithmetic of one pair that is not a weight.
struct ExpertOptions {
  Activation activation = Activation::fp8;
  Quantisation quantisation;
  std::optional<float> clamp;
  WeightAt weight_at = WeightAt::activation;
  int row_block = 0;  ///< rows a GEMM tile, rounded up to a multiple of 12; 0: chosen from the count. Never changes a bit.
  ActivationGrid activation_grid = ActivationGrid::persistent;
  int activation_slots = 1;  ///< persistent: blocks that run at once; a rank of the host engine is one thread
};

/// Rows as the GEMMs take them, in one of two forms. Row r of `fp8` is at values + r * value_stride,
/// its scales at scales + r * scale_stride; with bf16 only `values` is used. Strides are in bytes and
/// nothing needs to be aligned: wire rows in a heap and packed tensors are both views of this kind.
struct RowView {
  Activation format = Activation::bf16;
  const std::byte* values = nullptr;
  std::size_t value_stride = 0;
  const std::byte* scales = nullptr;  ///< one a group as ExpertOptions::quantisation says: ue8m0 bytes or f32
  std::size_t scale_stride = 0;
  /// Rows from `values` on that exist, whether they are anybody's or not; 0: not known. On a GPU, known rows are copied in boxes,
  /// faster than one by one.
  int rows = 0;
};

/// Where result rows go: row r at values + r * stride (in values; 0 means the hidden size).
struct ResultRows {
  bf16* values = nullptr;
  std::size_t stride = 0;
};

/// What a routed call returns: one row a token, the sum over this rank's experts; or one row a choice.
enum class RoutedOutput : std::uint8_t { sum, slots };

/// What calls took and did; every call adds to it. Times in seconds.
struct ExpertReport {
  double gemm1 = 0;
  double activation = 0;
  double gemm2 = 0;
  double sum = 0;                      ///< routed sums over a token's own experts
  std::int64_t rows = 0;               ///< (token, expert) pairs computed
  std::int64_t row_blocks = 0;         ///< row blocks of GEMM 1, summed over experts
  std::int64_t activation_blocks = 0;  ///< blocks of the activation grid
  std::int64_t empty_blocks = 0;       ///< of these, blocks that found no row
  std::int64_t scans = 0;              ///< prefix sums computed: one a block
};

/// The experts of one rank on the host engine. Weights stay in their storage format and are widened a
/// tile at a time; the GEMMs are OpenBLAS on one thread (the constructor says so to the library, for
/// the whole process), since every rank is a thread of its own. Runners are const and keep their scratch
/// in the calling thread, so that ranks may call at once. Whichever runner, layout or row block computes
/// a pair, its bits are the same.
///
/// Activations of 32 a group take four promotions in 128 columns instead of one: correct, slower.
class HostExperts {
 public:
  /// `experts` in local order: gate and up [intermediate, hidden], down [hidden, intermediate], both
  /// multiples of 64. No experts at all is legal. Throws InputError for shapes and options that do not fit.
  HostExperts(std::vector<ExpertWeights> experts, int hidden, int intermediate, const ExpertOptions& options);
  ~HostExperts();
  HostExperts(HostExperts&&) noexcept;
  HostExperts& operator=(HostExperts&&) noexcept;

  int count() const;
  int hidden() const;
  int intermediate() const;
  const ExpertOptions& options() const;
  /// Puts other weights in an expert's place, between calls. Throws InputError as the constructor, then nothing has changed.
  void update(int expert, const ExpertWeights& weights);

  // In all runners: rows of bf16 are quantised here if the activation is fp8; rows of fp8 with bf16
  // activations are an InputError. With weight_at = combine row weights are left to who sums.

  /// Expert e has the rows [row_begin[e], row_begin[e] + row_count[e]). row_weights: one a row of the
  /// view, or null for 1. Writes out at the same row indices, and no others.
  void contiguous(const RowView& rows, std::span<const int> row_begin, std::span<const int> row_count, const float* row_weights,
                  ResultRows out, ExpertReport* report = nullptr) const;

  /// Expert e has the first masked_m[e] rows of its block of block_rows. Rows beyond are neither read
  /// nor written. most_rows: the rows there can be in all, T x topk (0: experts x block_rows).
  void masked(const RowView& rows, int block_rows, std::span<const int> masked_m, const float* row_weights, ResultRows out,
              ExpertReport* report = nullptr, int most_rows = 0) const;

  /// Tokens in any order. local_ids and weights are [count, topk]; -1 is another rank's choice or none.
  /// sum: out [count, H], own pairs in choice order from +0 in f32, rounded once; zeros where there are
  /// none. slots: out [count, topk, H], rows of own pairs alone are written.
  void routed(const RowView& rows, int count, int topk, const int* local_ids, const float* weights, RoutedOutput mode,
              ResultRows out, ExpertReport* report = nullptr) const;

  // Parts of one expert, as the fused layer's tasks are cut. Rows and results are those of whole calls, bit for bit. Throw
  // InputError for an expert or a part that there is not.

  /// Columns [128 part, 128 part + 128) of the intermediate size, or what is left of them: GEMM 1 and activation of `count` rows.
  /// row_weights: one a row, or null for 1. Valid until the calling thread's next call of any runner.
  RowView activations(const RowView& rows, int count, const float* row_weights, int expert, int part) const;
  /// Columns [256 part, 256 part + 256) of the hidden size, likewise: GEMM 2 of `count` rows of activations. Row i is written at
  /// out.values + i * out.stride.
  void results(const RowView& activations, int count, int expert, int part, ResultRows out) const;

  /// Every row through one expert with weight 1, as a shared expert: out [count, H].
  void dense(const RowView& rows, int count, ResultRows out, ExpertReport* report = nullptr, int expert = 0) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
