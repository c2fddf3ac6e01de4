// Synthetic layers and hidden states: the same from the same seed, different from any other, and of the size that real
// layers have.
#include "layer/synthetic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "heddle/experts.hpp"

namespace heddle {
namespace {

constexpr WeightKind all_kinds[] = {WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4, WeightKind::nvfp4,
                                    WeightKind::mxfp8};

SyntheticOptions options_of(WeightKind kind, std::uint64_t seed) {
  SyntheticOptions options;
  options.shape = {320, 192, 6, 2, std::nullopt};
  options.kind = kind;
  options.shared_kind = WeightKind::bf16;
  options.shared_intermediate = 128;
  options.selection_bias = true;
  options.seed = seed;
  return options;
}

bool same(std::span<const std::byte> a, std::span<const std::byte> b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

std::vector<float> row_of(const WeightMatrix& weights, int row) {
  std::vector<float> values(static_cast<std::size_t>(weights.cols));
  widen_row(weights, row, 0, weights.cols, values.data());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] *= promotion_scale(weights, row, static_cast<int>(i) / 128);
  return values;
}

double spread(const WeightMatrix& weights) {
  double squares = 0;
  for (int row = 0; row < weights.rows; ++row) {
    for (const float value : row_of(weights, row)) squares += static_cast<double>(value) * value;
  }
  return std::sqrt(squares / weights.rows / weights.cols);
}

TEST(Synthetic, MatricesFitTheirKindAndHaveUsualSizes) {
  for (const WeightKind kind : all_kinds) {
    SyntheticLayer layer(options_of(kind, 5));
    for (int e = 0; e < 6; ++e) {
      const ExpertWeights expert = layer.expert(e);
      check_weights(expert.gate, 192, 320, "gate");
      check_weights(expert.up, 192, 320, "up");
      check_weights(expert.down, 320, 192, "down");
      for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        EXPECT_EQ(matrix->kind, kind);
        const double size = spread(*matrix) * std::sqrt(matrix->cols);
        EXPECT_GT(size, 0.5) << "kind " << static_cast<int>(kind);
        EXPECT_LT(size, 2.0) << "kind " << static_cast<int>(kind);
      }
    }
  }
}

TEST(Synthetic, TheSameFromTheSameSeedInAnyOrderAndFromAnyThread) {
  for (const WeightKind kind : all_kinds) {
    SyntheticLayer forwards(options_of(kind, 9));
    SyntheticLayer backwards(options_of(kind, 9));
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int e = 5; e >= 0; --e) backwards.expert(e);
      });
    }
    for (auto& thread : threads) thread.join();
    for (int e = 0; e < 6; ++e) {
      EXPECT_TRUE(same(forwards.expert(e).down.values, backwards.expert(e).down.values));
      EXPECT_TRUE(same(forwards.expert(e).gate.scales, backwards.expert(e).gate.scales));
      EXPECT_EQ(backwards.expert(e).up.values.data(), backwards.expert(e).up.values.data()) << "drawn once";
    }
    EXPECT_TRUE(same(forwards.source().shared->weights.up.values, backwards.source().shared->weights.up.values));
    EXPECT_EQ(forwards.router_weights(), backwards.router_weights());
    EXPECT_EQ(forwards.router_bias(), backwards.router_bias());
  }
}

/// Every run of 16 bytes is drawn once: not by another expert, matrix or seed, and not shifted.
TEST(Synthetic, NothingIsDrawnTwice) {
  for (const WeightKind kind : all_kinds) {
    std::set<std::vector<std::byte>> runs;
    std::size_t count = 0;
    for (const std::uint64_t seed : {0u, 1u, 2u, 3u}) {
      SyntheticLayer layer(options_of(kind, seed));
      for (int e = 0; e < 6; ++e) {
        const ExpertWeights expert = layer.expert(e);
        for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
          // The first values at every place of a run, so that sequences which are shifted against each other show.
          for (std::size_t at = 0; at < 256; ++at, ++count) {
            const auto begin = matrix->values.begin() + static_cast<std::ptrdiff_t>(at);
            runs.emplace(begin, begin + 16);
          }
        }
      }
    }
    EXPECT_EQ(runs.size(), count) << "kind " << static_cast<int>(kind);
  }
}

TEST(Synthetic, HiddenStatesDifferBySeedAndMayHaveOutliers) {
  constexpr int tokens = 40;
  constexpr int hidden = 512;
  const auto gaussian = draw_hidden_states(tokens, hidden, HiddenStates::gaussian, 7);
  ASSERT_EQ(gaussian.size(), static_cast<std::size_t>(tokens * hidden));
  for (const std::uint64_t seed : {8u, 9u}) {
    const auto other = draw_hidden_states(tokens, hidden, HiddenStates::gaussian, seed);
    for (std::size_t shift = 0; shift < 8; ++shift) {
      std::size_t equal = 0;
      for (std::size_t i = 0; i + shift < gaussian.size(); ++i) equal += gaussian[i + shift].bits == other[i].bits ? 1 : 0;
      EXPECT_LT(equal, gaussian.size() / 50) << "seeds 7 and " << seed << " at a shift of " << shift;
    }
  }
  const auto largest = [](const std::vector<bf16>& values) {
    float most = 0;
    for (const bf16 value : values) most = std::max(most, std::abs(to_float(value)));
    return most;
  };
  EXPECT_LT(largest(gaussian), 8.0f);
  EXPECT_GT(largest(draw_hidden_states(tokens, hidden, HiddenStates::heavy_tailed, 7)), 20.0f);
  EXPECT_TRUE(draw_hidden_states(0, hidden, HiddenStates::heavy_tailed, 7).empty());
}

}  // namespace
}  // namespace heddle
