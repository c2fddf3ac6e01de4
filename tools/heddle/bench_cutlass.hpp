// CUTLASS's grouped GEMM of e4m3 with block scales, as a peer of the fp8_block products: the same arithmetic on the stored weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "heddle/formats.hpp"

namespace heddle::tool {

/// One expert's product: tokens [rows, cols] and weights [columns, cols], both e4m3 and row-major, with f32 scales a token and 128
/// of K, [rows, cols / 128], and a block of 128 x 128, [columns / 128, cols / 128]. Results [rows, columns].
struct GroupedProblem {
  int rows = 0;
  int columns = 0;
  int cols = 0;
  const std::byte* tokens = nullptr;
  const float* token_scales = nullptr;
  const std::byte* weights = nullptr;
  const float* weight_scales = nullptr;
  bf16* results = nullptr;
};

/// All experts of a product, ready to be launched any number of times.
class CutlassGrouped {
 public:
  /// On the current device. Throws Error with CUTLASS's reason.
  explicit CutlassGrouped(const std::vector<GroupedProblem>& problems);
  ~CutlassGrouped();
  CutlassGrouped(const CutlassGrouped&) = delete;
  CutlassGrouped& operator=(const CutlassGrouped&) = delete;

  void launch(cudaStream_t stream);
  /// What kernel it is, in words.
  static const char* kernel();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle::tool
