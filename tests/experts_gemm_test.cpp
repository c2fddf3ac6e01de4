// The tile engine: what it computes, and that nothing around a row changes a bit of it.
#include <cblas.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "experts/host/gemm.hpp"
#include "experts/host/tile.hpp"
#include "experts_support.hpp"

namespace heddle {
namespace {

using testing::OwnedRows;
using testing::OwnedWeights;
using testing::pick;
using testing::Random;

struct Options {
  Activation activation = Activation::fp8;
  Quantisation quantisation;
  int row_block = 0;
};

std::vector<std::uint16_t> multiply(const RowView& view, const std::vector<int>& rows, const WeightMatrix& weights,
                                    const Options& options) {
  use_one_blas_thread();
  TileEngine engine;
  Operand operand;
  operand.pack(view, rows.data(), static_cast<int>(rows.size()), weights.cols, options.activation, options.quantisation);
  std::vector<bf16> out(rows.size() * static_cast<std::size_t>(weights.rows));
  engine.multiply(operand, weights, options.row_block, {out.data(), static_cast<std::size_t>(weights.rows), nullptr});
  return testing::bits_of(out);
}

std::vector<int> iota(int count) {
  std::vector<int> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

Options random_options(Random& random) {
  Options options;
  options.activation = pick(random, 0, 2) == 0 ? Activation::bf16 : Activation::fp8;
  options.quantisation.group = pick(random, 0, 3) == 0 ? 32 : 128;
  options.quantisation.scale = pick(random, 0, 1) == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0;
  return options;
}

/// The BLAS kernels of this machine treat every row and column of the tile shapes alike.
TEST(Gemm, BlasTreatsTileRowsAlike) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  std::normal_distribution<float> normal;
  use_one_blas_thread();
  for (const int width : {tile::columns / 2, tile::columns}) {
    const int stride = width + 2 * tile::guard;
    std::vector<float> weights(static_cast<std::size_t>(stride * tile::step), 0.0f);
    std::generate_n(weights.begin() + tile::guard * tile::step, width * tile::step, [&] { return normal(random); });
    std::vector<float> row(tile::step);
    std::generate(row.begin(), row.end(), [&] { return normal(random); });
    for (const int depth : {128, 64, 32}) {
      std::vector<float> first;
      for (int count = tile::row_unit; count <= tile::most_rows; count += tile::row_unit) {
        std::vector<float> rows;
        for (int i = 0; i < count; ++i) {
          rows.insert(rows.end(), row.begin(), row.end());
        }
        std::vector<float> out(static_cast<std::size_t>(count * stride), std::nanf(""));
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, count, stride, depth, 1.0f, rows.data(), tile::step, weights.data(),
                    tile::step, 0.0f, out.data(), stride);
        for (int i = 0; i < count; ++i) {
          const auto at = out.begin() + i * stride + tile::guard;
          if (first.empty()) {
            first.assign(at, at + width);
          }
          ASSERT_TRUE(std::equal(first.begin(), first.end(), at))
              << "width " << width << " depth " << depth << " row " << i << " of " << count;
        }
      }
    }
  }
}

/// Small integers make every partial sum exact in any order, so the bits are those of the promotions.
TEST(Gemm, PromotesInAscendingStepsOf128) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const int group : {128, 32}) {
    for (const int cols : {64, 128, 448}) {
      const int rows = 320;
      const int count = 37;
      OwnedWeights weights = testing::random_weights(random, WeightKind::fp8_block, rows, cols);
      for (std::byte& code : weights.values) {
        code = static_cast<std::byte>(to_e4m3(static_cast<float>(pick(random, -8, 8))));
      }
      Options options{Activation::fp8, {group, ScaleFormat::f32}, 0};
      OwnedRows tokens = testing::random_rows(random, count, cols, Activation::fp8, options.quantisation);
      for (int i = 0; i < count; ++i) {
        for (int k = 0; k < cols; ++k) {
          tokens.bytes[static_cast<std::size_t>(i) * tokens.view.value_stride + static_cast<std::size_t>(k)] =
              static_cast<std::byte>(to_e4m3(static_cast<float>(pick(random, -8, 8))));
        }
      }
      const auto out = multiply(tokens.view, iota(count), weights.view, options);
      std::vector<float> wide(static_cast<std::size_t>(cols));
      for (int n = 0; n < rows; ++n) {
        widen_row(weights.view, n, 0, cols, wide.data());
        for (int i = 0; i < count; ++i) {
          const std::byte* row = tokens.view.values + static_cast<std::size_t>(i) * tokens.view.value_stride;
          float sum = 0.0f;
          for (int begin = 0; begin < cols; begin += group) {
            float partial = 0.0f;
            for (int k = begin; k < std::min(begin + group, cols); ++k) {
              partial += from_e4m3(static_cast<std::uint8_t>(row[k])) * wide[static_cast<std::size_t>(k)];
            }
            float scale;
            std::memcpy(&scale, tokens.view.scales + static_cast<std::size_t>(i) * tokens.view.scale_stride + begin / group * 4, 4);
            sum = std::fma(partial, scale * promotion_scale(weights.view, n, begin / 128), sum);
          }
          ASSERT_EQ(out[static_cast<std::size_t>(i * rows + n)], to_bf16(sum).bits)
              << "group " << group << " cols " << cols << " row " << i << " column " << n;
        }
      }
    }
  }
}

TEST(Gemm, AgreesWithFloat64) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const WeightKind kind : testing::all_kinds) {
    for (int round = 0; round < 4; ++round) {
      const int rows = 64 * pick(random, 1, 6);
      const int cols = 64 * pick(random, 1, 8);
      const int count = pick(random, 1, 30);
      const Options options = random_options(random);
      const OwnedWeights weights = testing::random_weights(random, kind, rows, cols);
      const OwnedRows tokens = testing::random_rows(random, count, cols, options.activation, options.quantisation);
      const auto out = multiply(tokens.view, iota(count), weights.view, options);
      std::vector<float> wide(static_cast<std::size_t>(cols));
      std::vector<float> token(static_cast<std::size_t>(cols));
      RowFormat wire;
      wire.wire = options.activation == Activation::fp8 ? Wire::fp8 : Wire::bf16;
      wire.hidden = cols;
      wire.quantisation = options.quantisation;
      for (int i = 0; i < count; ++i) {
        widen_row(tokens.bytes.data() + static_cast<std::size_t>(i) * wire.row_bytes(), wire, token.data());
        for (int n = 0; n < rows; ++n) {
          widen_row(weights.view, n, 0, cols, wide.data());
          double sum = 0;
          double magnitudes = 0;
          for (int k = 0; k < cols; ++k) {
            const double weight =
                static_cast<double>(wide[static_cast<std::size_t>(k)]) * promotion_scale(weights.view, n, k / 128);
            sum += token[static_cast<std::size_t>(k)] * weight;
            magnitudes += std::abs(token[static_cast<std::size_t>(k)] * weight);
          }
          // The rounding to bf16, and f32's on the way.
          const double got = to_float(bf16{out[static_cast<std::size_t>(i * rows + n)]});
          ASSERT_NEAR(got, sum, 0x1p-8 * std::abs(sum) + 1e-6 * magnitudes)
              << "kind " << static_cast<int>(kind) << " [" << rows << ", " << cols << "], row " << i << " of " << count
              << ", column " << n;
        }
      }
    }
  }
}

TEST(Gemm, NeighboursPlaceAndBlockChangeNoBit) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 24; ++round) {
    const WeightKind kind = testing::all_kinds[round % 5];
    const int rows = 64 * pick(random, 1, 9);
    const int cols = 64 * pick(random, 1, 6);
    const int count = round % 4 == 0 ? pick(random, 200, 460) : pick(random, 1, 120);
    Options options = random_options(random);
    const OwnedWeights weights = testing::random_weights(random, kind, rows, cols);
    const OwnedRows tokens = testing::random_rows(random, count, cols, options.activation, options.quantisation);
    const auto expected = multiply(tokens.view, iota(count), weights.view, options);
    for (int variant = 0; variant < 5; ++variant) {
      std::vector<int> order = iota(count);
      std::shuffle(order.begin(), order.end(), random);
      order.resize(static_cast<std::size_t>(variant == 0 ? 1 : pick(random, 1, count)));
      options.row_block = variant == 1 ? 0 : pick(random, 8, 256);
      const auto got = multiply(tokens.view, order, weights.view, options);
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto a = got.begin() + static_cast<std::ptrdiff_t>(i) * rows;
        ASSERT_TRUE(std::equal(a, a + rows, expected.begin() + order[i] * rows))
            << "kind " << static_cast<int>(kind) << " [" << rows << ", " << cols << "], row " << order[i] << " as row " << i
            << " of " << order.size() << ", row block " << options.row_block;
      }
    }
  }
}

/// A NaN row, or an infinite one, is its own affair.
TEST(Gemm, NanStaysInItsRow) {
  Random random(11);
  const OwnedWeights weights = testing::random_weights(random, WeightKind::bf16, 192, 256);
  OwnedRows tokens = testing::random_rows(random, 20, 256, Activation::bf16, {});
  const Options options{Activation::bf16, {}, 0};
  const auto before = multiply(tokens.view, iota(20), weights.view, options);
  const std::uint16_t nan = 0x7FC0;
  std::memcpy(tokens.bytes.data() + 7 * tokens.view.value_stride + 2 * 100, &nan, 2);
  const auto after = multiply(tokens.view, iota(20), weights.view, options);
  for (int i = 0; i < 20; ++i) {
    for (int n = 0; n < 192; ++n) {
      const std::size_t at = static_cast<std::size_t>(i * 192 + n);
      if (i == 7) {
        ASSERT_TRUE(std::isnan(to_float(bf16{after[at]})));
      } else {
        ASSERT_EQ(after[at], before[at]);
      }
    }
  }
}

}  // namespace
}  // namespace heddle
