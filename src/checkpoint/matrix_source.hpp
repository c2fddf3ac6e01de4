// One weight matrix in a checkpoint: its kind from names, types and shapes; later its checked view.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/tensor_table.hpp"
#include "heddle/experts.hpp"

namespace heddle::checkpoint {

/// Memory for what cannot be a view of the file: unaligned tensors, transposed matrices.
class OwnedMemory {
 public:
  /// The bytes themselves if they are aligned, otherwise an aligned copy that lives as long as this object.
  std::span<const std::byte> aligned(std::span<const std::byte> bytes, std::size_t alignment);
  /// Room of its own, aligned for any element.
  std::span<std::byte> allocate(std::size_t bytes);

 private:
  std::deque<std::vector<std::byte>> blocks_;
};

/// A matrix whose names, types and shapes have been checked; its bytes have not been read.
struct MatrixSource {
  WeightKind kind = WeightKind::bf16;
  int rows = 0;
  int cols = 0;
  const Tensor* values = nullptr;
  const Tensor* scales = nullptr;        ///< null for bf16
  const Tensor* tensor_scale = nullptr;  ///< nvfp4 only
  bool tensor_scale_divides = false;     ///< weight_global_scale instead of weight_scale_2
};

/// Decides the kind of the matrix `stem` ("...experts.3.w1") by the tensors it has. Throws InputError.
MatrixSource find_matrix(TensorTable& table, const std::string& stem);

/// Reads and checks the scales (0xFF, NaN and infinity are errors that name tensor, row and group) and gives
/// the view. `memory` must live as long as the view.
WeightMatrix view_matrix(const MatrixSource& source, OwnedMemory& memory);

}  // namespace heddle::checkpoint
