// The fixed shapes of the host tile engine, and why they are what they are.
//
// A row's bits must not depend on its neighbours, its place in a block or the size of the block. BLAS
// kernels promise no such thing: at the edges of what they block by, some sum K in two chains instead of
// one (OpenBLAS for Haswell and Zen: the first and last 8 weight rows of a block, for half of the token
// rows), and small products take other kernels altogether (AVX-512: areas up to 1200). So
//  - the weight side of every product has zero rows as guards at both ends, whose results are dropped;
//  - it is at most 256 + 2 * 8 wide, within one block of every kernel;
//  - the token side is a multiple of 12 (which 4, 6 and 12 divide), padded with zero rows;
//  - no product is smaller than 12 x (128 + 2 * 8).
// Inside these shapes all rows and columns are treated alike; tests/experts_gemm_test.cpp proves it
// for the kernels of the machine it runs on.
#pragma once

#include <cstddef>

namespace heddle::tile {

inline constexpr int step = 128;     ///< values of K a promotion; also the row stride of operands, in floats
inline constexpr int columns = 256;  ///< weight rows a product; a last one may have 128
inline constexpr int guard = 8;      ///< zero weight rows before and after
inline constexpr int row_unit = 12;  ///< token rows of a product are a multiple of this
inline constexpr int most_rows = 264;
inline constexpr int chunk_rows = 192;  ///< token rows that share one widening of a weight tile, at least one block

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
constexpr int steps(int cols) { return (cols + step - 1) / step; }

/// Weight rows of a product that has `left` rows still to do.
constexpr int width(int left) { return left > columns / 2 ? columns : columns / 2; }

/// Token rows of a block: `wanted` (0: chosen from the count) as a multiple of 12.
constexpr int block_rows(int wanted, int count) {
  const int block = round_up(wanted > 0 ? wanted : 96, row_unit);
  const int needed = round_up(count, row_unit);
  const int limited = block < most_rows ? block : most_rows;
  return needed < limited ? needed : limited;
}

}  // namespace heddle::tile
