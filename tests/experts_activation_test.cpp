// The activation step: the flat list, what the two grids launch, that they agree, and the row itself.
#include "experts/activation/activation.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "experts_support.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

using testing::pick;
using testing::Random;

std::vector<int> row_ends(const std::vector<int>& masked_m) {
  std::vector<int> ends(masked_m.size());
  prefix_sum(masked_m.data(), static_cast<int>(masked_m.size()), ends.data());
  return ends;
}

TEST(FlatList, TheArticlesExamples) {
  EXPECT_EQ(row_ends({4, 2}), (std::vector<int>{4, 6}));
  EXPECT_EQ(row_ends({3, 0, 2, 1}), (std::vector<int>{3, 3, 5, 6}));
  const std::vector<int> ends = row_ends({4, 2});
  const FlatRow fifth = find_row(ends.data(), 2, 5);
  EXPECT_EQ(fifth.expert, 1);
  EXPECT_EQ(fifth.row, 1);
  EXPECT_EQ(fifth.place(8), 9u);  // slot 1 * 8 + 1
  EXPECT_EQ(fifth.place(0), 5u);
  const std::vector<int> with_empty = row_ends({3, 0, 2, 1});
  const FlatRow third = find_row(with_empty.data(), 4, 3);  // the empty expert 1 is skipped
  EXPECT_EQ(third.expert, 2);
  EXPECT_EQ(third.row, 0);
}

TEST(FlatList, EveryRowIsFoundOnce) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> masked_m(static_cast<std::size_t>(pick(random, 1, 70)));
    for (int& rows : masked_m) {
      rows = pick(random, 0, 2) == 0 ? 0 : pick(random, 0, 9);
    }
    const std::vector<int> ends = row_ends(masked_m);
    int flat = 0;
    for (std::size_t expert = 0; expert < masked_m.size(); ++expert) {
      for (int row = 0; row < masked_m[expert]; ++row, ++flat) {
        const FlatRow found = find_row(ends.data(), static_cast<int>(ends.size()), flat);
        ASSERT_EQ(found.expert, static_cast<int>(expert));
        ASSERT_EQ(found.row, row);
        ASSERT_EQ(found.flat, flat);
      }
    }
    ASSERT_EQ(flat, ends.back());
  }
}

TEST(FlatList, GridSizes) {
  EXPECT_EQ(padded_blocks(1024 * 4, 6), 24576);
  EXPECT_EQ(persistent_blocks(148 * 8, 4096, 6), 1184);
  EXPECT_EQ(persistent_blocks(132 * 8, 4096, 6), 1056);
  EXPECT_EQ(persistent_blocks(1184, 8, 2), 16);  // no more than can have a row
}

/// Buffers of a step, [experts, block_rows] or without gaps, filled with a pattern that must survive where no row is.
struct Buffers {
  ActivationStep step;
  std::vector<bf16> gate_up;
  std::vector<float> weights;
  std::vector<std::byte> values;
  std::vector<std::byte> scales;

  Buffers(Random& random, int places, int intermediate, Activation format, const Quantisation& quantisation) {
    step.intermediate = intermediate;
    step.format = format;
    step.quantisation = quantisation;
    std::normal_distribution<float> normal(0.0f, 4.0f);
    gate_up.resize(static_cast<std::size_t>(places) * 2 * static_cast<std::size_t>(intermediate));
    for (bf16& value : gate_up) {
      value = to_bf16(normal(random));
    }
    for (int i = 0; i < places; ++i) {
      weights.push_back(std::uniform_real_distribution<float>(0.0f, 2.5f)(random));
    }
    point();
  }
  void point() {
    step.gate_up = gate_up.data();
    step.weights = weights.data();
    values.assign(weights.size() * step.value_bytes(), std::byte{0xA5});
    scales.assign(weights.size() * step.scale_bytes(), std::byte{0xA5});
    step.values = values.data();
    step.scales = scales.data();
  }
};

TEST(Activation, GridsGiveTheSameBitsAndAreCounted) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 30; ++round) {
    const int experts = pick(random, 1, 20);
    const int block_rows = pick(random, 1, 12);
    std::vector<int> masked_m(static_cast<std::size_t>(experts));
    for (int& rows : masked_m) {
      rows = pick(random, 0, 1) == 0 ? 0 : pick(random, 0, block_rows);
    }
    const int rows = std::accumulate(masked_m.begin(), masked_m.end(), 0);
    const int most_rows = rows + pick(random, 0, 50);
    const int slots = pick(random, 1, 40);
    const Activation format = round % 3 == 0 ? Activation::bf16 : Activation::fp8;
    const Quantisation quantisation{round % 2 == 0 ? 128 : 32, round % 5 == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0};
    Buffers buffers(random, experts * block_rows, 64 * pick(random, 1, 5), format, quantisation);
    buffers.step.block_rows = block_rows;
    buffers.step.clamp = round % 4 == 0 ? std::nullopt : std::optional<float>(3.0f);

    const GridCounts padded = run_padded(buffers.step, masked_m, most_rows);
    const std::vector<std::byte> values = buffers.values;
    const std::vector<std::byte> scales = buffers.scales;
    buffers.point();
    const GridCounts persistent = run_persistent(buffers.step, masked_m, slots, most_rows);
    ASSERT_EQ(buffers.values, values);
    ASSERT_EQ(buffers.scales, scales);

    EXPECT_EQ(padded.blocks, most_rows);
    EXPECT_EQ(padded.scans, most_rows);
    EXPECT_EQ(padded.empty, most_rows - rows);
    EXPECT_EQ(padded.rows, rows);
    const int blocks = std::min(slots, most_rows);
    EXPECT_EQ(persistent.blocks, blocks);
    EXPECT_EQ(persistent.scans, blocks);
    EXPECT_EQ(persistent.empty, std::max(0, blocks - rows));
    EXPECT_EQ(persistent.rows, rows);

    for (int expert = 0; expert < experts; ++expert) {  // rows beyond the counts are not written
      for (int row = masked_m[static_cast<std::size_t>(expert)]; row < block_rows; ++row) {
        const std::size_t begin = static_cast<std::size_t>(expert * block_rows + row) * buffers.step.value_bytes();
        for (std::size_t i = begin; i < begin + buffers.step.value_bytes(); ++i) {
          ASSERT_EQ(values[i], std::byte{0xA5});
        }
      }
    }
  }
}

/// The running example of the article at a batch of 64 a GPU, with the row counts that it gives.
TEST(Activation, TheArticlesCounts) {
  Random random(5);
  std::vector<int> masked_m(64, 6);  // 384 rows
  Buffers buffers(random, 384, 64, Activation::fp8, {});
  const GridCounts padded = run_padded(buffers.step, masked_m, padded_blocks(4096, 6));
  EXPECT_EQ(padded.blocks, 24576);
  EXPECT_EQ(padded.empty, 24192);
  EXPECT_EQ(padded.rows, 384);
  const GridCounts persistent = run_persistent(buffers.step, masked_m, 148 * 8, padded_blocks(4096, 6));
  EXPECT_EQ(persistent.blocks, 1184);
  EXPECT_EQ(persistent.empty, 800);
  EXPECT_EQ(persistent.rows, 384);
}

TEST(Activation, TheRowFollowsTheRules) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const bool clamped : {false, true}) {
    const int width = 192;
    Buffers buffers(random, 5, width, Activation::bf16, {});
    if (clamped) {
      buffers.step.clamp = 2.5f;
    }
    const std::vector<int> masked_m{5};
    run_persistent(buffers.step, masked_m, 1, 5);
    for (std::size_t row = 0; row < 5; ++row) {
      for (std::size_t i = 0; i < width; ++i) {
        double gate = to_float(buffers.gate_up[row * 2 * width + i]);
        double up = to_float(buffers.gate_up[row * 2 * width + width + i]);
        if (clamped) {
          gate = std::min(gate, 2.5);
          up = std::min(std::max(up, -2.5), 2.5);
        }
        const double expected = gate / (1 + std::exp(-gate)) * up * static_cast<double>(buffers.weights[row]);
        bf16 got;
        std::memcpy(&got, buffers.values.data() + 2 * (row * width + i), 2);
        // Half a unit in the last place of bf16, and f32 rounding on the way.
        ASSERT_NEAR(to_float(got), expected, std::abs(expected) * 0x1.02p-8 + 1e-30) << "gate " << gate << " up " << up;
      }
    }
  }
}

TEST(Activation, QuantisesWhatBf16Rounds) {
  Random random(9);
  const int width = 320;  // two groups and a half
  Buffers fp8(random, 7, width, Activation::fp8, {128, ScaleFormat::f32});
  const std::vector<int> masked_m{3, 0, 4};
  run_padded(fp8.step, masked_m, 7);
  Buffers plain = fp8;
  plain.step.format = Activation::bf16;
  plain.point();
  run_padded(plain.step, masked_m, 7);
  std::vector<float> wide(width);
  double error = 0;
  double norm = 0;
  for (std::size_t row = 0; row < 7; ++row) {
    widen_fp8(reinterpret_cast<const std::uint8_t*>(fp8.values.data() + row * width),
              fp8.scales.data() + row * fp8.step.scale_bytes(), width, fp8.step.quantisation, wide.data());
    for (std::size_t i = 0; i < width; ++i) {
      bf16 value;
      std::memcpy(&value, plain.values.data() + 2 * (row * width + i), 2);
      error += std::pow(wide[i] - to_float(value), 2);
      norm += std::pow(to_float(value), 2);
    }
  }
  EXPECT_LE(std::sqrt(error / norm), 0.04);  // e4m3 has 4 significant bits
  EXPECT_GT(error, 0);
}

TEST(Activation, NanAndInfinityStayInTheirRow) {
  Random random(4);
  Buffers buffers(random, 3, 128, Activation::fp8, {});
  buffers.gate_up[5] = to_bf16(std::numeric_limits<float>::quiet_NaN());
  buffers.gate_up[2 * 128 + 128 + 9] = to_bf16(std::numeric_limits<float>::infinity());
  buffers.step.clamp = 10.0f;
  const std::vector<int> masked_m{3};
  run_persistent(buffers.step, masked_m, 2, 3);
  EXPECT_EQ(buffers.values[5], std::byte{0x7F});
  EXPECT_NE(buffers.scales[0], std::byte{0xFF});
  EXPECT_NE(buffers.scales[1], std::byte{0xFF}) << "the clamp makes an infinite up value 10";
  buffers.step.clamp.reset();
  buffers.point();
  run_persistent(buffers.step, masked_m, 2, 3);
  EXPECT_EQ(buffers.scales[1], std::byte{0xFF});
  EXPECT_NE(buffers.scales[2], std::byte{0xFF});
}

TEST(Activation, MoreRowsThanThereCanBeAreRefused) {
  Random random(4);
  Buffers buffers(random, 6, 64, Activation::fp8, {});
  const std::vector<int> masked_m{4, 2};
  EXPECT_THROW(run_padded(buffers.step, masked_m, 5), InputError);
  EXPECT_THROW(run_persistent(buffers.step, masked_m, 1, 5), InputError);
  EXPECT_THROW(run_persistent(buffers.step, masked_m, 0, 6), InputError);
  const std::vector<int> negative{4, -1};
  EXPECT_THROW(run_padded(buffers.step, negative, 6), InputError);
}

}  // namespace
}  // namespace heddle
