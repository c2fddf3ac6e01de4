// The experts of one rank on one GPU: weights in its memory, and the runners of HostExperts as kernels on a stream. Built with
// HEDDLE_CUDA only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "heddle/device.hpp"
#include "heddle/experts.hpp"

namespace heddle {

namespace sm90 {
class DeviceWeights;
}

/// Rows a CTA takes together: few (up to 32), some more (up to 64; with mxfp4 weights, else as large) or many (up to 128; 96 with
/// bf16 operands). Never changes a bit.
enum class DeviceRowBlocks : std::uint8_t { automatic, small, medium, large };

/// Most (row, expert) pairs of a call.
inline constexpr int most_device_pairs = 1 << 25;

struct DeviceExpertsOptions {
  int device = 0;
  int most_rows =
      0;  ///< (row, expert) pairs of all local experts together in a call, at most most_device_pairs; 0: nothing is ever computed
  int most_tokens = 0;  ///< of a routed call; 0: there are none
  int topk = 0;         ///< of a routed call
  int ctas = 0;         ///< that the products take, one a SM; 0: all SMs
  /// SwiGLU in the epilogue of the first product. Otherwise (the chain) gate and up are stored as bf16 and a kernel of its own
  /// activates them, by ExpertOptions::activation_grid. The bits are the same.
  bool fused_activation = true;
  DeviceRowBlocks row_blocks = DeviceRowBlocks::automatic;
  /// Tensor-parallel experts: this rank's part of every expert's intermediate size, [slice_first, slice_first + slice_count), in
  /// multiples of 64, with fp8_block of 128; count 0: up to the end. Results are then a part of the sum over the ranks.
  int slice_first = 0;
  int slice_count = 0;
  bool step_exponents = false;  ///< mxfp4: room for updates whose groups differ by more than 11 binades in a row
};

/// What loading weights took, updates included.
struct WeightReport {
  double seconds = 0;
  std::size_t stored_bytes = 0;  ///< read from the host
  std::size_t device_bytes = 0;  ///< of device memory held by weights
  int experts = 0;               ///< laid out; one that was laid out twice counts twice
};

/// One expert (or a rank's slice of it) as it was stored, with its memory: gate, up, down. Moving it keeps the view right.
struct OwnedExpert {
  std::vector<std::byte> values[3];
  std::vector<std::byte> scales[3];
  ExpertWeights view;
};

/// All memory is taken and all kernels are loaded by the constructor. Calls queue kernels on a stream and return; they allocate
/// nothing, wait for nothing and may be captured. Every pointer given to them is into memory of the GPU, counts included: they are
/// read when the kernels run, so a captured call may be replayed with others. Calls of one object share its buffers and have to
/// follow each other on one stream, or by events; use an object a stream otherwise (a shared expert has its own).
///
/// Whichever runner, row block or activation computes a pair, its bits are the same. Activations are fp8 or, with weights that
/// are multiplied as bf16 (bf16, mxfp8, nvfp4), bf16.
///
/// Rows are views with rows at multiples of 16 bytes and scales at multiples of 4, readable to a multiple of 4 bytes: rows as they
/// arrive are. bf16 rows are quantised here if the activation is fp8; fp8 rows with bf16 activations are an InputError. Result rows
/// are 16-byte aligned, their stride (in values, 0: hidden) a multiple of 8.
///
/// Counts that do not fit: a negative one is taken as 0, one above most_rows (masked: above block_rows) as that, and of all rows,
/// in the order of experts, the first most_rows are computed. What is left out is not written (in routed sums it adds nothing), and
/// throw_if_failed() tells.
class DeviceExperts {
 public:
  /// `experts` in local order and of one weight kind, at most 1024; none at all is legal. gate and up [intermediate, hidden], down
  /// [hidden, intermediate], both multiples of 64; they are read here and not needed later. Of `options` row_block and
  /// activation_slots do not matter. Throws InputError for shapes, kinds and options that do not fit, and for weights that cannot
  /// be laid out; Error where the GPU fails.
  DeviceExperts(std::span<const ExpertWeights> experts, int hidden, int intermediate, const ExpertOptions& options,
                const DeviceExpertsOptions& device);
  ~DeviceExperts();
  DeviceExperts(DeviceExperts&&) noexcept;
  DeviceExperts& operator=(DeviceExperts&&) noexcept;

  int count() const;
  int hidden() const;
  int intermediate() const;  ///< of the slice
  const ExpertOptions& options() const;
  std::size_t buffer_bytes() const;  ///< of device memory beside the weights

  // expected_rows: rows an expert that the caller expects, e.g. tokens * topk / experts; it picks the row block where that is
  // automatic. 0: as if most_rows were spread evenly.

  /// Expert e has the rows [row_begin[e], row_begin[e] + row_count[e]), in device memory, [count()] each. row_weights: one a row of
  /// the view, or null for 1. Writes out at the same row indices, and no others. Runs may be padded in any way.
  void contiguous(const RowView& rows, const int* row_begin, const int* row_count, const float* row_weights, ResultRows out,
                  DeviceStream stream, int expected_rows = 0);

  /// Expert e has the first masked_m[e] rows of its block of block_rows. Rows beyond are not written, and what they hold does not
  /// matter; but all count() * block_rows rows of the view (or RowView::rows, if given) have to exist, they may be read.
  void masked(const RowView& rows, int block_rows, const int* masked_m, const float* row_weights, ResultRows out,
              DeviceStream stream, int expected_rows = 0);

  /// Tokens in any order. local_ids and weights (null: 1) are [count, topk]; ids that are not local experts are another rank's
  /// choices or none. sum: out [count, H], own pairs in choice order from +0 in f32, rounded once; zeros where there are none.
  /// slots: out [count, topk, H], rows of own pairs alone are written. count is at most most_tokens and topk at most the options';
  /// tokens_here: the number of tokens on the device, at most `count`, or null for `count`.
  void routed(const RowView& rows, int count, int topk, const std::int32_t* local_ids, const float* weights, RoutedOutput mode,
              ResultRows out, DeviceStream stream, const int* tokens_here = nullptr, int expected_rows = 0);

  /// Every row through one expert with weight 1, as a shared expert: out [count, H]. count is at most most_rows; rows_here: the
  /// number of rows on the device, at most `count`, or null for `count`.
  void dense(const RowView& rows, int count, ResultRows out, DeviceStream stream, int expert = 0, const int* rows_here = nullptr);

  /// Throws Error (fault) if a kernel found a count that did not fit since the last time this was asked, naming an expert and its
  /// count. Looks at host memory only: ask when the stream has been waited for.
  void throw_if_failed();

  /// Puts other weights (of the whole intermediate size) in an expert's place: calls behind this one on the stream use them, those
  /// on other streams must not be running. Waits for the stream once; not in graph capture, but captured calls use the new weights.
  /// Throws InputError as the constructor, then nothing has changed.
  void update(int expert, const ExpertWeights& weights, DeviceStream stream);
  /// An expert's (slice of) weights byte for byte as they were stored, after what is on the stream. Waits for the stream.
  OwnedExpert read_back(int expert, DeviceStream stream) const;
  const WeightReport& report() const;
  /// The weights in the GPU's memory, for the fused layer, which takes the same ones; there for as long as anybody holds them.
  std::shared_ptr<const sm90::DeviceWeights> weights() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
