// cuBLASLt's dense product, as a peer. The library is found at run time; a build without its header says so when asked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "heddle/formats.hpp"

namespace heddle::tool {

/// Tokens [rows, cols] times weights [columns, cols], both row-major, e4m3 (one scale of 1, fast accumulation) or bf16; results
/// [rows, columns] in bf16.
class CublasDense {
 public:
  /// On the current device, with the algorithms that the library proposes first. Throws InputError where the library is not there
  /// or does not take the shape.
  CublasDense(bool fp8, int rows, int columns, int cols);
  ~CublasDense();
  CublasDense(const CublasDense&) = delete;
  CublasDense& operator=(const CublasDense&) = delete;

  int algorithms() const;
  void launch(int algorithm, const std::byte* weights, const std::byte* tokens, bf16* results, cudaStream_t stream);
  /// Of the library, as it says itself.
  static std::size_t version();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle::tool
