// Grouped products alone, on one GPU: GEMM 1 or 2 of the runners for those who bring the rest. grouped_product of the host engine
// (experts/host/grouped.hpp), with its weights loaded once. Built with HEDDLE_CUDA only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "experts/sm90/cuda_runners.hpp"
#include "heddle/device.hpp"
#include "heddle/device_experts.hpp"
#include "heddle/experts.hpp"

namespace heddle::sm90 {

struct GroupedOptions {
  int device = 0;
  int most_rows = 0;  ///< of a contiguous call, at 12 bytes of device memory each; 0: masked calls alone
  DeviceRowBlocks row_blocks = DeviceRowBlocks::automatic;
};

/// Rows and results of a call, in device memory: rows.rows of them.
struct GroupedRows {
  RowView rows;
  Quantisation quantisation;  ///< of fp8 rows
  ResultRows out;             ///< stride 0: N
  int expected_rows = 0;      ///< a group; 0: all rows spread evenly. Picks the kernel and changes no bit
};

/// What becomes of the result rows of no group.
enum class NobodysRows : std::uint8_t { left, zeroed };

/// Matrices [groups, N, K] and products of rows with them: out[i] = bf16(rows[i] times the matrix of row i's group, transposed).
///
/// All memory is taken and all kernels are loaded by the constructor. Calls queue kernels on a stream and return; they allocate
/// nothing, wait for nothing and may be captured. Layouts are read when the kernels run. Calls of one object share its buffers and
/// have to follow each other on one stream, or by events.
///
/// Rows are bf16 with bf16 weights, e4m3 with a scale of 128 or 32 columns with fp8_block and mxfp4. With mxfp8 and nvfp4, which
/// are multiplied as bf16, they are bf16, or fp8 ones whose codes have been widened to bf16 before, two bytes a value, with their
/// scales (takes_wide_codes). They are aligned as those of DeviceExperts.
class GroupedProduct {
 public:
  /// `weights` in host memory, 1 to 1024 of one size and kind; N and K are multiples of 64. They are read here and not needed
  /// later. Throws InputError for what does not fit or cannot be laid out; Error where the GPU fails.
  GroupedProduct(std::span<const WeightMatrix> weights, const GroupedOptions& options);

  int groups() const { return groups_; }
  int rows() const { return matrix_->view.plan.rows; }  ///< N
  int cols() const { return matrix_->view.plan.cols; }  ///< K
  WeightKind kind() const { return matrix_->view.plan.kind; }
  bool takes_wide_codes() const {
    const WeightPlan& plan = matrix_->view.plan;
    return plan.kind != WeightKind::bf16 && plan.shape().operand == Operand::bf16;
  }
  std::size_t weight_bytes() const { return matrix_->bytes(loading::size(groups_)); }

  /// group_of: [rows], in any order; others than 0 .. groups - 1: a row of no group, neither read nor, but for zeros, written.
  void contiguous(const GroupedRows& call, const std::int32_t* group_of, NobodysRows nobodys, DeviceStream stream);
  /// ends: [groups], groups one behind another that begin at multiples of the alignment (EndsCall).
  void ended(const GroupedRows& call, const std::int32_t* ends, int alignment, NobodysRows nobodys, DeviceStream stream);
  /// Group g has the first counts[g] rows of block g of rows.rows / groups rows. Other rows may be read and are not written. A
  /// negative count is taken as 0, one above the block as that, and throw_if_failed() tells.
  void masked(const GroupedRows& call, const std::int32_t* counts, DeviceStream stream);

  /// Once the stream has been waited for. Throws Error where a masked call met a count that did not fit; then not again.
  void throw_if_failed();

 private:
  bool load(std::span<const WeightMatrix> weights, bool step_exponents);
  void check_call(const char* layout, const GroupedRows& call) const;
  void check_contiguous(const GroupedRows& call) const;
  ProductCall product(const GroupedRows& call, const RowMap& places) const;
  void launch(const ProductCall& product, const GroupedRows& call, cudaStream_t stream) const;

  GroupedOptions options_;
  int groups_;
  int sms_;
  std::unique_ptr<loading::Matrix> matrix_;
  std::unique_ptr<RefusedWord> refused_;
  loading::DeviceMemory<int> counts_;    ///< [groups]
  loading::DeviceMemory<int> group_of_;  ///< [most_rows], as the next two
  loading::DeviceMemory<int> row_of_;    ///< rows by group
  loading::DeviceMemory<int> place_of_;
};

}  // namespace heddle::sm90
