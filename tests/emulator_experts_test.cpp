// The Hopper tile engine, its kernel run thread by thread on the host: rings, roles, row maps, tails, fragment layouts. Sums are
// compared bit for bit with the same sums said again from the definition of the formats.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "emulator_products.hpp"

namespace heddle::sm90 {
namespace {

constexpr std::uint16_t poison = 0xABCD;

/// Runs the case with the sums stored, rows scattered by `target`, and compares every value.
template <class Shape>
void check_stored(const Inputs& in, unsigned seed, Products products, bool in_boxes) {
  const std::vector<float> expected = all_sums(in);
  const int width = in.plan.rows;
  const std::size_t stride = size(width) + 8;
  std::vector<int> target(size(in.tokens));
  std::iota(target.begin(), target.end(), 0);
  Random random(seed);
  std::shuffle(target.begin(), target.end(), random);
  std::vector<bf16> out(size(in.tokens + 1) * stride, bf16{poison});
  ProductCall call;
  call.weights = in.matrix();
  call.tokens = in.rows(in_boxes ? Shape::box_rows : 0);
  call.counts = in.wanted.counts.data();
  call.experts = static_cast<int>(in.wanted.counts.size());
  call.results = {out.data(), stride, in.wanted.rows, {RowMap::Kind::flat, 0, nullptr, target.data()}};
  run<Shape>(call, pick(random, 1, 3), seed, products);
  int wrong = 0;
  for (int row = 0; row < in.tokens; ++row) {
    for (std::size_t n = 0; n < stride; ++n) {
      const bf16 got = out[size(target[size(row)]) * stride + n];
      const std::uint16_t want = n < size(width) ? to_bf16(expected[size(row) * size(width) + n]).bits : poison;
      if (got.bits != want && ++wrong <= 5) {
        ADD_FAILURE() << "row " << row << ", column " << n << ": " << to_float(got) << ", expected " << to_float(bf16{want});
      }
    }
  }
  EXPECT_EQ(wrong, 0);
  for (std::size_t n = 0; n < stride; ++n) ASSERT_EQ(out[size(in.tokens) * stride + n].bits, poison) << "a row that is nobody's";
}

/// Row blocks of every size, rows one by one and in boxes, products as late and as early as they may be.
template <WeightKind kind>
void check_kind(const Case& wanted, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "kind " << static_cast<int>(kind) << ", seed " << seed << ", rows " << wanted.rows
                                    << ", cols " << wanted.cols << (wanted.paired ? ", paired" : ""));
  Random random(seed);
  const Inputs in(random, wanted);
  check_stored<SmallBlocks<kind, false>>(in, seed, Products::at_wait, false);
  check_stored<SmallBlocks<kind, false>>(in, seed + 1, Products::at_issue, true);
  check_stored<LargeBlocks<kind, false>>(in, seed + 2, Products::at_wait, true);
  check_stored<LargeBlocks<kind, false>>(in, seed + 3, Products::at_issue, false);
  if constexpr (has_medium_blocks(kind)) check_stored<MediumBlocks<kind, false>>(in, seed + 4, Products::at_issue, true);
  if constexpr (kind == WeightKind::bf16) {  // of the fused layer
    check_stored<BySlab<LargeBlocks<kind, false>>>(in, seed + 5, Products::at_wait, true);
    check_stored<BySlab<LargeBlocks<kind, false>>>(in, seed + 6, Products::at_issue, false);
  }
}

template <WeightKind kind>
void check_shapes(TokenScales scaling) {
  const unsigned seed = std::random_device{}();
  check_kind<kind>({kind, false, 64, 128, {1}, scaling}, seed);
  check_kind<kind>({kind, false, 320, 192, {3, 0, 17}, scaling}, seed + 10);
  check_kind<kind>({kind, true, 192, 320, {9, 0, 0, 33, 1}, scaling}, seed + 20);
}

TEST(StoredSums, Mxfp4) { check_shapes<WeightKind::mxfp4>(TokenScales::by_128); }
TEST(StoredSums, Fp8Block) { check_shapes<WeightKind::fp8_block>(TokenScales::by_128); }
TEST(StoredSums, Bf16) { check_shapes<WeightKind::bf16>(TokenScales::none); }
TEST(StoredSums, Nvfp4) { check_shapes<WeightKind::nvfp4>(TokenScales::none); }
TEST(StoredSums, Mxfp8) { check_shapes<WeightKind::mxfp8>(TokenScales::none); }

TEST(StoredSums, RowBlocksOfEverySize) {
  const unsigned seed = std::random_device{}();
  check_kind<WeightKind::fp8_block>({WeightKind::fp8_block, false, 64, 128, {130, 65, 40, 8}, TokenScales::by_128}, seed);
  check_kind<WeightKind::bf16>({WeightKind::bf16, false, 64, 128, {100, 65, 16}, TokenScales::none}, seed + 10);
}

struct TileTaken {
  template <int tokens>
  void run(int* taken) const {
    *taken = tokens;
  }
};

template <class Sizes>
int tile_of(Sizes sizes, int rows) {
  int taken = 0;
  with_tile_of(sizes, rows, TileTaken{}, &taken);
  return taken;
}
template <int... tokens>
void expect_smallest(TileSizes<tokens...> sizes) {
  const std::vector<int> all{tokens...};
  for (int rows = 1; rows <= all.back(); ++rows) {
    EXPECT_EQ(tile_of(sizes, rows), *std::lower_bound(all.begin(), all.end(), rows)) << rows << " rows";
  }
}

TEST(Tiles, TheSmallestThatCoversIsTaken) {
  expect_smallest(TilesOf<32, true>::Sizes{});
  expect_smallest(TilesOf<32, false>::Sizes{});
  expect_smallest(TilesOf<64, true>::Sizes{});
  expect_smallest(TilesOf<64, false>::Sizes{});
  expect_smallest(TilesOf<96, false>::Sizes{});
  EXPECT_EQ(tile_of(TilesOf<32, true>::Sizes{}, 17), 24);
  EXPECT_EQ(tile_of(TilesOf<32, false>::Sizes{}, 17), 32);
}

// More tiles than other kernels have; the largest is multiplied in two pieces.
TEST(StoredSums, TilesOfTheUsualCall) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Inputs in(random, {WeightKind::mxfp4, true, 64, 320, {20, 64, 9, 45, 55}, TokenScales::by_128});
  check_stored<Plain<SmallBlocks<WeightKind::mxfp4, false>>>(in, seed, Products::at_wait, false);
  check_stored<Plain<MediumBlocks<WeightKind::mxfp4, false>>>(in, seed + 1, Products::at_wait, false);
  check_stored<Plain<MediumBlocks<WeightKind::mxfp4, false>>>(in, seed + 2, Products::at_issue, true);
}

TEST(StoredSums, StepExponents) {
  check_kind<WeightKind::mxfp4>({WeightKind::mxfp4, true, 64, 320, {11, 2}, TokenScales::by_128, ScaleFormat::ue8m0, true},
                                std::random_device{}());
}

TEST(StoredSums, ScalesAsFloats) {
  const unsigned seed = std::random_device{}();
  check_kind<WeightKind::fp8_block>({WeightKind::fp8_block, true, 64, 1088, {35}, TokenScales::by_128, ScaleFormat::f32}, seed);
  check_kind<WeightKind::mxfp8>({WeightKind::mxfp8, false, 64, 320, {7}, TokenScales::by_128, ScaleFormat::f32}, seed + 10);
  check_kind<WeightKind::nvfp4>({WeightKind::nvfp4, true, 64, 192, {9}, TokenScales::by_128, ScaleFormat::ue8m0}, seed + 20);
}

TEST(StoredSums, GroupsOf32) {
  const unsigned seed = std::random_device{}();
  check_kind<WeightKind::mxfp4>({WeightKind::mxfp4, true, 64, 192, {9, 3}, TokenScales::by_32, ScaleFormat::ue8m0}, seed);
  check_kind<WeightKind::fp8_block>({WeightKind::fp8_block, false, 64, 320, {9}, TokenScales::by_32, ScaleFormat::f32}, seed + 10);
  check_kind<WeightKind::bf16>({WeightKind::bf16, false, 64, 192, {5}, TokenScales::by_32, ScaleFormat::ue8m0}, seed + 20);
}

// ---- Row maps -----------------------------------------------------------------------------------------------------------

/// Tokens gathered by a list from regions an expert, results to where the experts' rows begin.
TEST(RowMaps, RegionsListsAndGathers) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Inputs in(random, {WeightKind::mxfp4, false, 64, 128, {3, 0, 12}, TokenScales::by_128});
  const std::vector<float> expected = all_sums(in);
  // Row i of expert e is token (flat row) region[e * 16 + i]; its result goes to row begin[e] + i.
  std::vector<int> region(3 * 16, -1);
  std::iota(region.begin(), region.begin() + 3, 0);
  std::iota(region.begin() + 32, region.begin() + 44, 3);
  const std::vector<int> begin{20, 0, 4};
  std::vector<bf16> out(32 * 64, bf16{poison});
  ProductCall call;
  call.weights = in.matrix();
  call.tokens = in.rows(0);
  call.tokens.map = {RowMap::Kind::blocks, 16, nullptr, region.data()};
  call.counts = in.wanted.counts.data();
  call.experts = 3;
  call.results = {out.data(), 64, 64, {RowMap::Kind::listed, 0, begin.data(), nullptr}};
  run<SmallBlocks<WeightKind::mxfp4, false>>(call, 2, seed, Products::at_wait);
  for (int row = 0; row < 32; ++row) {
    const int flat = row >= 20 && row < 23 ? row - 20 : row >= 4 && row < 16 ? row - 4 + 3 : -1;
    for (int n = 0; n < 64; ++n) {
      const std::uint16_t want = flat < 0 ? poison : to_bf16(expected[size(flat) * 64 + size(n)]).bits;
      ASSERT_EQ(out[size(row) * 64 + size(n)].bits, want) << "row " << row << ", column " << n;
    }
  }
}

TEST(RowMaps, NoRowsAtAll) {
  Random random(1);
  const Inputs in(random, {WeightKind::bf16, false, 64, 128, {0, 0}, TokenScales::none});
  check_stored<SmallBlocks<WeightKind::bf16, false>>(in, 1, Products::at_wait, true);
}

}  // namespace
}  // namespace heddle::sm90
