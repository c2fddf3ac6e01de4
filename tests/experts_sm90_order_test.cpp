// The order of weights in GPU memory and their widening, without a GPU: the functions are the ones that kernels run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "exchange_support.hpp"
#include "experts/sm90/host_weights.hpp"
#include "experts/sm90/widen.hpp"
#include "experts_support.hpp"
#include "heddle/error.hpp"

namespace heddle::sm90 {
namespace {

using heddle::testing::OwnedWeights;
using heddle::testing::pick;
using heddle::testing::Random;
using heddle::testing::size;

/// Two matrices as gate and up, or one as down: what is laid out.
struct Layout {
  WeightPlan plan;
  std::vector<OwnedWeights> stored;
  std::string names[2] = {"expert 5, gate", "expert 5, up"};

  Layout(Random& random, WeightKind kind, bool paired, int rows, int cols, ScaleFormat block_scale = ScaleFormat::f32) {
    for (int i = 0; i < (paired ? 2 : 1); ++i)
      stored.push_back(heddle::testing::random_weights(random, kind, rows, cols, block_scale));
    if (paired && kind == WeightKind::nvfp4) stored[1].view.tensor_scale = 0.5f;
    plan = {kind, paired, false, paired ? 2 * rows : rows, cols};
  }
  WeightSource source() const {
    const auto whole = [](const WeightMatrix& m) { return stored_part(m, {0, m.rows}, {0, m.cols}, "whole"); };
    return {{whole(stored.front().view), whole(stored.back().view)}};
  }
  OrderedWeights ordered() const { return order_weights(plan, source(), names); }
  const WeightMatrix& matrix(int half) const { return stored[plan.paired ? size(half) : 0].view; }
};

/// The value in a register, from the formats' definitions.
float operand_value(Operand operand, std::uint32_t word, int index) {
  if (operand == Operand::e4m3) return from_e4m3(static_cast<std::uint8_t>(word >> (8 * index)));
  return to_float(bf16{static_cast<std::uint16_t>(word >> (16 * index))});
}

/// Which row and column a value of a slab has, said again from the definition of the instruction's operand.
struct Place {
  int half;
  int row;
  int column;
};
Place place_of(const WeightPlan& plan, int slab, int step, int thread, int index, int value) {
  const int w = thread / 32;
  const int g = thread % 32 / 4;
  const int q = thread % 4;
  const int j = index / 4;
  const int i = index % 4;
  const int high = i & 1;
  const int k = plan.shape().operand == Operand::e4m3 ? 128 * step + 32 * j + 16 * (i >> 1) + 4 * q + value
                                                      : 64 * step + 16 * j + 8 * (i >> 1) + 2 * q + value;
  return {high, plan.paired ? 32 * slab + 8 * w + g : 64 * slab + 16 * w + g + 8 * high, k};
}

template <WeightKind kind>
void check_slab(const Layout& layout, const OrderedWeights& ordered, const std::vector<float> (&expected)[2], int slab, int step) {
  const WeightPlan& plan = layout.plan;
  const int tile = slab / tile_slabs;
  const std::byte* chunk = ordered.chunks.data() + plan.chunk_offset(tile, step);
  const std::byte* data = chunk + plan.data_offset(slab % tile_slabs);
  const std::byte* scales = chunk + plan.scales_offset(plan.slabs_of(tile), slab % tile_slabs);
  for (int thread = 0; thread < slab_threads; ++thread) {
    std::uint32_t a[slab_registers];
    load_slab<kind>(data, scales, thread, a);
    const RowPair factors = plan.step_exponents ? step_factors(scales, thread) : RowPair{1.0f, 1.0f};
    for (int index = 0; index < slab_registers; ++index) {
      const float factor = index % 2 == 0 ? factors.low : factors.high;
      const int row = 64 * slab + thread / 32 * 16 + thread % 32 / 4 + 8 * (index % 2);
      const float row_scale = plan.row_scales() == 0 ? 1.0f : ordered.row_scales[size(row)];
      for (int value = 0; value < (plan.shape().operand == Operand::e4m3 ? 4 : 2); ++value) {
        const Place place = place_of(plan, slab, step, thread, index, value);
        const float tensor_scale = kind == WeightKind::nvfp4 ? layout.matrix(place.half).tensor_scale : 1.0f;
        const std::size_t at = size(place.row) * size(plan.cols) + size(place.column);
        const float want = place.column < plan.cols ? expected[plan.paired ? place.half : 0][at] * tensor_scale : 0.0f;
        const float got = operand_value(plan.shape().operand, a[index], value) * factor * row_scale;
        ASSERT_EQ(float_bits(got), float_bits(want))
            << got << " and not " << want << ": slab " << slab << " step " << step << " thread " << thread << " register " << index
            << " value " << value << ", row " << place.row << " column " << place.column << " of " << layout.names[place.half];
      }
    }
    if (kind == WeightKind::fp8_block) {
      const RowPair scale = block_scales(scales);
      const int column = step * 128;
      const Place low = place_of(plan, slab, step, thread, 0, 0);
      const Place high = place_of(plan, slab, step, thread, 1, 0);
      ASSERT_LT(column, plan.cols);
      ASSERT_EQ(scale.low, promotion_scale(layout.matrix(0), low.row, step)) << "slab " << slab << " step " << step;
      ASSERT_EQ(scale.high, promotion_scale(layout.matrix(1), high.row, step)) << "slab " << slab << " step " << step;
    }
  }
}

/// Every register of every thread, then the way back.
void check_layout(const Layout& layout) {
  const WeightPlan& plan = layout.plan;
  SCOPED_TRACE(::testing::Message() << "kind " << static_cast<int>(plan.kind) << (plan.paired ? " paired " : " plain ") << plan.rows
                                    << " x " << plan.cols << (plan.step_exponents ? ", step exponents" : ""));
  const OrderedWeights ordered = layout.ordered();
  ASSERT_EQ(ordered.chunks.size(), plan.bytes());
  std::vector<float> expected[2];
  for (std::size_t i = 0; i < layout.stored.size(); ++i) {
    const WeightMatrix& matrix = layout.stored[i].view;
    expected[i].resize(size(matrix.rows) * size(matrix.cols));
    for (int row = 0; row < matrix.rows; ++row) widen_row(matrix, row, 0, matrix.cols, &expected[i][size(row) * size(matrix.cols)]);
  }
  with_kind(plan.kind, [&]<WeightKind kind>() {
    for (int slab = 0; slab < plan.slabs(); ++slab) {
      for (int step = 0; step < plan.steps(); ++step) {
        check_slab<kind>(layout, ordered, expected, slab, step);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
  if (::testing::Test::HasFatalFailure()) return;
  const auto back = restore_weights(plan, ordered.chunks.data(), ordered.row_scales.data(), layout.stored[0].view.block_scale);
  ASSERT_EQ(back.size(), layout.stored.size());
  for (std::size_t i = 0; i < back.size(); ++i) {
    EXPECT_EQ(back[i].values, layout.stored[i].values) << "matrix " << i;
    EXPECT_EQ(back[i].scales, layout.stored[i].scales) << "matrix " << i;
    EXPECT_EQ(back[i].view.tensor_scale, layout.stored[i].view.tensor_scale) << "matrix " << i;
  }
}

class OrderedKinds : public ::testing::TestWithParam<WeightKind> {};

TEST_P(OrderedKinds, RegistersAreTheWeightsAndTheyReadBack) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  struct Shape {
    int rows;
    int cols;
  };
  // Tiles of 1 to 4 slabs, a last step of 64 columns for e4m3 operands.
  for (const Shape shape : {Shape{64, 64}, {128, 320}, {192, 2880}, {320, 128}, {448, 192}}) {
    for (const bool paired : {false, true}) {
      for (const ScaleFormat format : {ScaleFormat::f32, ScaleFormat::ue8m0}) {
        if (format == ScaleFormat::ue8m0 && GetParam() != WeightKind::fp8_block) continue;
        check_layout(Layout(random, GetParam(), paired, shape.rows, shape.cols, format));
        if (HasFailure()) return;
      }
    }
  }
}

// Columns [64, 256) of rows [128, 256), say, are a matrix of their own; fp8_block begins at multiples of 128.
TEST_P(OrderedKinds, PartsAreLaidOutLikeMatricesOfTheirOwn) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const OwnedWeights whole = heddle::testing::random_weights(random, GetParam(), 320, 448);
  const int unit = GetParam() == WeightKind::fp8_block ? 128 : 64;
  for (int round = 0; round < 6; ++round) {
    const Range rows{unit * pick(random, 0, 128 / unit), 64 * pick(random, 1, 3)};
    const Range cols{unit * pick(random, 0, 256 / unit), 64 * pick(random, 1, 3)};
    SCOPED_TRACE(::testing::Message() << "rows from " << rows.first << ", " << rows.count << ", columns from " << cols.first << ", "
                                      << cols.count);
    const StoredMatrix part = stored_part(whole.view, rows, cols, "down");
    const WeightPlan plan{GetParam(), false, false, rows.count, cols.count};
    const OrderedWeights ordered = order_weights(plan, {{part, part}}, {"down", "down"});
    const auto own = restore_weights(plan, ordered.chunks.data(), ordered.row_scales.data(), whole.view.block_scale);
    ASSERT_EQ(own.size(), 1u);
    std::vector<float> want(size(cols.count));
    std::vector<float> got(size(cols.count));
    for (int row = 0; row < rows.count; ++row) {
      widen_row(whole.view, rows.first + row, cols.first, cols.first + cols.count, want.data());
      widen_row(own[0].view, row, 0, cols.count, got.data());
      ASSERT_EQ(got, want) << "row " << row;
      for (int column = 0; column < cols.count; column += 128) {
        ASSERT_EQ(promotion_scale(own[0].view, row, column / 128),
                  promotion_scale(whole.view, rows.first + row, (cols.first + column) / 128));
      }
    }
  }
}

TEST_P(OrderedKinds, EveryOffsetIsWhereTheOneBeforeEnds) {
  for (const int slabs : {1, 4, 5, 10}) {
    for (const bool step_exponents : {false, true}) {
      if (step_exponents && GetParam() != WeightKind::mxfp4) continue;
      // 2880 columns are 22 promotions of 128 and half a one, which takes as many steps as a whole one.
      const WeightPlan plan{GetParam(), false, step_exponents, 64 * slabs, 2880};
      ASSERT_EQ(plan.steps(), plan.shape().step == 128 ? 23 : 46);
      std::size_t end = 0;
      for (int tile = 0; tile < plan.tiles(); ++tile) {
        for (int step = 0; step < plan.steps(); ++step) {
          ASSERT_EQ(plan.chunk_offset(tile, step), end);
          ASSERT_EQ(end % 16, 0u);
          const int count = plan.slabs_of(tile);
          ASSERT_EQ(plan.scales_offset(count, 0), plan.data_offset(count));
          ASSERT_GE(plan.chunk_bytes(tile), plan.scales_offset(count, count));
          ASSERT_LT(plan.chunk_bytes(tile), plan.scales_offset(count, count) + 16);
          end += size(plan.chunk_bytes(tile));
        }
      }
      ASSERT_EQ(plan.bytes(), end);
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<WeightKind>& kind) { return heddle::testing::name_of(kind.param); }
INSTANTIATE_TEST_SUITE_P(All, OrderedKinds, ::testing::ValuesIn(heddle::testing::all_kinds), name_of);

void set_scale(OwnedWeights& weights, int row, int group, int code) {
  const int groups = static_cast<int>(weights.scales.size()) / weights.view.rows;
  weights.scales[size(row * groups + group)] = static_cast<std::byte>(code);
}

void zero_group(OwnedWeights& weights, int row, int group) {
  const std::size_t bytes = weights.view.kind == WeightKind::mxfp4 ? 16 : 32;
  const std::size_t pitch = weights.values.size() / size(weights.view.rows);
  for (std::size_t i = 0; i < bytes; ++i) {
    weights.values[size(row) * pitch + size(group) * bytes + i] &=
        weights.view.kind == WeightKind::mxfp4 ? std::byte{0x88} : std::byte{0x80};
  }
}

void set_value(OwnedWeights& weights, int row, int column, int code) {
  const std::size_t index = size(row) * size(weights.view.cols) + size(column);
  if (weights.view.kind != WeightKind::mxfp4) {
    weights.values[index] = static_cast<std::byte>(code);
    return;
  }
  const int shift = static_cast<int>(index % 2) * 4;
  std::byte& byte = weights.values[index / 2];
  byte = (byte & static_cast<std::byte>(0xF0 >> shift)) | static_cast<std::byte>(code << shift);
}

std::string refusal(const Layout& layout) {
  try {
    layout.ordered();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(OrderedMxfp4, ElevenBinadesARowAtEveryEndOfTheScales) {
  Random random(11);
  for (const int largest : {11, 12, 120, 132, 133, 243, 254}) {
    Layout layout(random, WeightKind::mxfp4, true, 64, 320);
    for (OwnedWeights& weights : layout.stored) {
      for (int row = 0; row < 64; ++row) {
        for (int group = 0; group < 10; ++group) set_scale(weights, row, group, largest - (row + group) % 12);
      }
    }
    check_layout(layout);
    if (HasFailure()) return;
  }
}

// A group of zeros has no say, whatever its scale, keeps its signs, and its scale reads back.
TEST(OrderedMxfp4, GroupsOfZerosDoNotCount) {
  Random random(12);
  Layout layout(random, WeightKind::mxfp4, false, 128, 320);
  for (int row = 0; row < 128; ++row) {
    for (const int group : {2, 7}) {
      zero_group(layout.stored[0], row, group);
      set_scale(layout.stored[0], row, group, 2 * row % 255);
    }
  }
  for (int group = 0; group < 10; ++group) zero_group(layout.stored[0], 77, group);  // nothing but zeros
  check_layout(layout);
  layout.plan.step_exponents = true;
  check_layout(layout);
}

TEST(OrderedMxfp4, StepsHaveExponentsWhereARowSpansMore) {
  Random random(13);
  Layout layout(random, WeightKind::mxfp4, true, 96 + 32, 320);
  for (int row = 0; row < 128; ++row) {
    for (int group = 0; group < 10; ++group) set_scale(layout.stored[1], row, group, 60 + 40 * (group / 4) + (row + group) % 12);
  }
  set_value(layout.stored[1], 0, 0, 3);
  EXPECT_THAT(refusal(layout), ::testing::HasSubstr("binades below the largest of its row"));
  layout.plan.step_exponents = true;
  check_layout(layout);
}

TEST(OrderedMxfp4, WhatE4m3CannotHoldIsRefusedByName) {
  Random random(14);
  Layout layout(random, WeightKind::mxfp4, true, 64, 256);
  set_scale(layout.stored[1], 37, 5, 100);
  set_value(layout.stored[1], 37, 161, 1);
  set_scale(layout.stored[1], 37, 6, 112);
  set_value(layout.stored[1], 37, 192, 7);
  for (const int group : {4, 7}) set_scale(layout.stored[1], 37, group, 111);
  layout.plan.step_exponents = true;
  EXPECT_EQ(
      refusal(layout),
      "expert 5, up, row 37, column 160: scales of groups that are not zero differ by 12 binades within 128 columns; weights are "
      "widened to e4m3, which holds differences of up to 11");
  set_scale(layout.stored[1], 37, 5, 101);
  EXPECT_EQ(refusal(layout), "");
  set_scale(layout.stored[0], 9, 0, 0xFF);
  EXPECT_EQ(refusal(layout), "expert 5, gate, row 9, column 0: the scale is not a number");
  layout.plan.step_exponents = false;
  EXPECT_EQ(refusal(layout), "expert 5, gate, row 9, column 0: the scale is not a number");
}

TEST(OrderedMxfp4, StepsTooFarApartAreRefused) {
  Random random(15);
  Layout layout(random, WeightKind::mxfp4, false, 64, 256);
  for (int group = 0; group < 8; ++group) {
    set_value(layout.stored[0], 3, 32 * group, 5);
    set_scale(layout.stored[0], 3, group, group < 4 ? 20 : 147);
  }
  layout.plan.step_exponents = true;
  EXPECT_THAT(refusal(layout), ::testing::HasSubstr("row 3, column 0: scales are 127 binades below"));
  for (int group = 4; group < 8; ++group) set_scale(layout.stored[0], 3, group, 146);
  check_layout(layout);
}

TEST(OrderedMxfp8, LargeScalesGoToTheRow) {
  Random random(16);
  for (const int largest : {134, 135, 200, 254}) {
    Layout layout(random, WeightKind::mxfp8, true, 64, 320);
    for (OwnedWeights& weights : layout.stored) {
      for (int row = 0; row < 64; ++row) {
        for (int group = 0; group < 10; ++group) set_scale(weights, row, group, largest - (row + 7 * group) % 100);
        zero_group(weights, row, 3);
        set_scale(weights, row, 3, 2 * row);
      }
    }
    // Values that f32 itself cannot hold (480 * 2^127) are infinite in widen_row and not here; keep to those it can.
    if (largest > 246) {
      for (OwnedWeights& weights : layout.stored) {
        for (std::byte& code : weights.values) code &= std::byte{0xBF};
      }
    }
    check_layout(layout);
    if (HasFailure()) return;
  }
}

TEST(OrderedMxfp8, RefusedByName) {
  Random random(17);
  Layout layout(random, WeightKind::mxfp8, true, 64, 128);
  set_value(layout.stored[0], 40, 70, 0xFF);
  EXPECT_EQ(refusal(layout), "expert 5, gate, row 40, column 70: the value is not a number");
  set_value(layout.stored[0], 40, 70, 1);
  EXPECT_EQ(refusal(layout), "");
  set_scale(layout.stored[1], 2, 1, 0xFF);
  EXPECT_EQ(refusal(layout), "expert 5, up, row 2, column 32: the scale is not a number");
  set_scale(layout.stored[1], 2, 1, 5);
  set_value(layout.stored[1], 2, 33, 1);
  EXPECT_THAT(refusal(layout), ::testing::HasSubstr("expert 5, up, row 2, column 32: the group's scale is 1"));
}

TEST(OrderedNvfp4, RefusedByName) {
  Random random(18);
  Layout layout(random, WeightKind::nvfp4, true, 64, 128);
  set_scale(layout.stored[0], 1, 3, 0x7F);
  EXPECT_EQ(refusal(layout), "expert 5, gate, row 1, column 48: the scale is not a number");
  set_scale(layout.stored[0], 1, 3, 0x85);
  EXPECT_THAT(refusal(layout), ::testing::HasSubstr("expert 5, gate, row 1, column 48: the scale is negative"));
  set_scale(layout.stored[0], 1, 3, 0);  // zeros, whatever the codes
  check_layout(layout);
  layout.stored[1].view.tensor_scale = 0x1p120f;
  EXPECT_THAT(refusal(layout), ::testing::HasSubstr("expert 5, up, row 0, column 0: the tensor scale"));
}

TEST(OrderedParts, WhatDoesNotLineUpIsRefused) {
  Random random(19);
  const auto message = [&](WeightKind kind, Range rows, Range cols) -> std::string {
    const OwnedWeights weights = heddle::testing::random_weights(random, kind, 256, 256);
    try {
      stored_part(weights.view, rows, cols, "expert 1, down");
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(WeightKind::mxfp4, {64, 64}, {64, 192}), "");
  EXPECT_THAT(message(WeightKind::fp8_block, {0, 256}, {64, 64}),
              ::testing::AllOf(::testing::HasSubstr("expert 1, down"), ::testing::HasSubstr("columns 64"),
                               ::testing::HasSubstr("multiples of 128")));
  EXPECT_THAT(message(WeightKind::fp8_block, {64, 64}, {0, 64}), ::testing::HasSubstr("rows 64"));
  EXPECT_THAT(message(WeightKind::mxfp8, {32, 64}, {0, 64}), ::testing::HasSubstr("multiples of 64"));
  EXPECT_THAT(message(WeightKind::bf16, {0, 100}, {0, 64}), ::testing::HasSubstr("100 rows"));
  EXPECT_THAT(message(WeightKind::bf16, {192, 128}, {0, 64}), ::testing::HasSubstr("the matrix has 256"));
}

// Every stored word comes back from its arranged form, and each bit has a place of its own.
TEST(OrderedWords, ArrangedBitsAreAPermutation) {
  for (const WeightKind kind : heddle::testing::all_kinds) {
    std::uint32_t seen = 0;
    for (int bit = 0; bit < 32; ++bit) seen |= 1u << detail::arranged_bit(kind, bit);
    EXPECT_EQ(seen, 0xFFFFFFFFu) << "kind " << static_cast<int>(kind);
    EXPECT_EQ(detail::restore(kind, detail::arrange(kind, 0x12345678u)), 0x12345678u);
  }
}

TEST(OrderedWords, BytePermuteIsTheDevices) {
  EXPECT_EQ(detail::byte_permute(0x33221100u, 0x77665544u, 0x7531u), 0x77553311u);
  EXPECT_EQ(detail::byte_permute(0x33221100u, 0x77665544u, 0xFEDC8000u), 0x00000000u);
  EXPECT_EQ(detail::byte_permute(0x33221100u, 0x77665544u, 0x0123u), 0x00112233u);
}

}  // namespace
}  // namespace heddle::sm90
