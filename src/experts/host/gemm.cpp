#include "experts/host/gemm.hpp"

#include <cblas.h>

#include <algorithm>
#include <mutex>

#include "experts/host/kernels.hpp"
#include "experts/host/tile.hpp"

namespace heddle {
namespace {

constexpr int scale_block = 128;  // weight rows that share a promotion scale

std::size_t size(int value) { return static_cast<std::size_t>(value); }

}  // namespace

void use_one_blas_thread() {
  static std::once_flag once;
  std::call_once(once, [] { openblas_set_num_threads(1); });
}

/// Weight rows [first, first + real) of the matrix as one side of a product, which is `width` wide plus guards.
struct TileEngine::Columns {
  int first;
  int real;
  int width;

  Columns(int first_row, int all_rows)
      : first(first_row), real(std::min(tile::columns, all_rows - first_row)), width(tile::width(all_rows - first_row)) {}
  int stride() const { return width + 2 * tile::guard; }
};

void TileEngine::widen(const WeightMatrix& weights, const Columns& columns, int step) {
  const int begin = step * tile::step;
  const int count = std::min(tile::step, weights.cols - begin);
  tile_kernels().widen_weights(weights, columns.first, columns.real, begin, count, weights_.data() + tile::guard * tile::step);
}

void TileEngine::accumulate(const Operand& rows, const WeightMatrix& weights, const Columns& columns, int step, int first,
                            int count, float* sums) {
  const int begin = step * tile::step;
  const int end = std::min(begin + tile::step, weights.cols);
  const int padded = tile::round_up(count, tile::row_unit);
  for (int k = begin; k < end; k += rows.group()) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, padded, columns.stride(), std::min(rows.group(), end - k), 1.0f,
                rows.values(step, first) + (k - begin), tile::step, weights_.data() + (k - begin), tile::step, 0.0f,
                partial_.data(), columns.stride());
    for (int part = 0; part < columns.real; part += scale_block) {
      const float weight_scale = promotion_scale(weights, columns.first + part, step);
      const int values = std::min(scale_block, columns.real - part);
      for (int row = 0; row < count; ++row) {
        const float* partial = partial_.data() + size(row) * size(columns.stride()) + size(tile::guard + part);
        const float scale = rows.scale(k / rows.group(), first + row) * weight_scale;
        tile_kernels().promote(partial, scale, values, sums + size(row) * size(columns.width) + size(part));
      }
    }
  }
}

int TileEngine::multiply(const Operand& rows, const WeightMatrix& weights, int row_block, const GemmOutput& out) {
  const int count = rows.count();
  if (count == 0) {
    return 0;
  }
  const int block = tile::block_rows(row_block, count);
  constexpr int most_stride = tile::columns + 2 * tile::guard;
  weights_.resize(size(most_stride) * tile::step);
  partial_.resize(size(block) * size(most_stride));
  sums_.resize(size(count) * tile::columns);

  for (int first = 0; first < weights.rows; first += tile::columns) {
    const Columns columns(first, weights.rows);
    const auto sums = [&](int row) { return sums_.data() + size(row) * size(columns.width); };
    std::fill_n(weights_.data(), size(columns.stride()) * tile::step, 0.0f);
    std::fill_n(sums_.data(), size(count) * size(columns.width), 0.0f);
    for (int step = 0; step < tile::steps(weights.cols); ++step) {
      widen(weights, columns, step);
      for (int row = 0; row < count; row += block) {
        accumulate(rows, weights, columns, step, row, std::min(block, count - row), sums(row));
      }
    }
    for (int row = 0; row < count; ++row) {
      bf16* to = out.values + size(out.rows != nullptr ? out.rows[row] : row) * out.stride + first;
      tile_kernels().round(sums(row), columns.real, to);
    }
  }
  return (count + block - 1) / block;
}

}  // namespace heddle
