// How the cells of a table are dealt over the threads of a rank: what a warp's spread() does, in a form that runs anywhere.
#pragma once

#include "heddle/formats.hpp"

/// A loop that is not unrolled on a GPU.
#if defined(__CUDA_ARCH__)
#define HEDDLE_ROLLED _Pragma("unroll 1")
#else
#define HEDDLE_ROLLED
#endif

namespace heddle {

/// Most columns of a spread: the threads of the smallest launch. Wider tables are spread in pieces.
constexpr int most_spread_columns = 256;

/// f(row, column) for the share of one thread of `threads`, a multiple of 256, in rows * columns; columns <= 2^shift <= 256. A
/// column a thread, so that no index is divided: 2^shift threads share a row.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // the caller says where f runs
#endif
template <class F>
HEDDLE_HOST_DEVICE void spread_over(int thread, int threads, int rows, int columns, int shift, F f) {
  const int column = thread & ((1 << shift) - 1);
  if (column < columns) {
    HEDDLE_ROLLED
    for (int row = thread >> shift; row < rows; row += threads >> shift) f(row, column);
  }
}

}  // namespace heddle
