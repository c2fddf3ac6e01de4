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
inline constexpr int usual_rows = 96;   ///< a block that nobody asked to be another size: partial sums stay in the L2 cache
inline constexpr int most_piece = 192;  ///< token rows that share one widening of the weights, unless a block is larger

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
constexpr int steps(int cols) { return (cols + step - 1) / step; }

/// Weight rows of a product that has `left` rows still to do.
constexpr int width(int left) { return left > columns / 2 ? columns : columns / 2; }

/// Parts of at most `most` that `count` is cut into, all of about one size and a multiple of 12.
constexpr int even_part(int count, int most) {
  const int parts = (count + most - 1) / most;
  return round_up((count + parts - 1) / parts, row_unit);
}

/// Token rows of a block: `wanted`, 0 meaning the usual ones, as a multiple of 12.
constexpr int block_rows(int wanted, int count) {
  const int block = wanted > 0 ? round_up(wanted, row_unit) : even_part(count, usual_rows);
  const int needed = round_up(count, row_unit);
  const int limited = block < most_rows ? block : most_rows;
  return needed < limited ? needed : limited;
}

/// Token rows that are packed and multiplied together.
constexpr int piece_rows(int wanted, int count) { return even_part(count, wanted > most_piece ? most_rows : most_piece); }

}  // namespace heddle::tile
