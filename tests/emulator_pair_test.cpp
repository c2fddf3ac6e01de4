// Weights of a kind whose chunks are larger than the stages of the ring: the tile engine with mxfp4's memory multiplies fp8 block
// weights, thread by thread on the host. Sums are compared bit for bit with those said again from the definition of the formats.
#include <gtest/gtest.h>

#include <vector>

#include "emulator_products.hpp"
#include "mega/sm90/pair_widener.cuh"

namespace heddle::sm90 {
namespace {

using SmallInTwo = InTwoStages<SmallBlocks<WeightKind::mxfp4, false>, WeightKind::fp8_block>;
using SmallActivatingInTwo = InTwoStages<SmallBlocks<WeightKind::mxfp4, true>, WeightKind::fp8_block>;
using LargeInTwo = InTwoStages<LargeBlocks<WeightKind::mxfp4, false>, WeightKind::fp8_block>;
static_assert(is_in_two_stages<LargeInTwo>() && !is_in_two_stages<LargeBlocks<WeightKind::mxfp4, false>>());
static_assert(sizeof(Shared<SmallActivatingInTwo>) == sizeof(Shared<SmallBlocks<WeightKind::mxfp4, true>>));

}  // namespace

/// The widening warpgroup of the product kernel copies instead.
template <>
class Widener<LargeInTwo> {
 public:
  Widener(Shared<LargeInTwo>& shared, int thread) : widener_(shared, thread) {}
  void widen(const WeightPlan& plan, const Task& task) { widener_.copy(plan, task); }

 private:
  PairWidener<LargeInTwo> widener_;
};

namespace {

template <class Shape>
void check_sums(const Inputs& in, unsigned seed, Products products) {
  const std::vector<float> expected = all_sums(in);
  const int width = in.plan.rows;
  std::vector<bf16> out(size(in.tokens) * size(width), bf16{0xABCD});
  ProductCall call;
  call.weights = in.matrix();
  call.tokens = in.rows(Shape::box_rows);
  call.counts = in.wanted.counts.data();
  call.experts = static_cast<int>(in.wanted.counts.size());
  call.results = {out.data(), size(width), in.wanted.rows, {RowMap::Kind::flat, 0, nullptr, nullptr}};
  run<Shape>(call, 2, seed, products);
  int wrong = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].bits != to_bf16(expected[i]).bits && ++wrong <= 5)
      ADD_FAILURE() << "row " << i / size(width) << ", column " << i % size(width) << ": " << to_float(out[i]) << ", expected "
                    << to_float(to_bf16(expected[i]));
  }
  EXPECT_EQ(wrong, 0);
}

// Tiles of one to four slabs, odd and even numbers of steps, every token format.
TEST(InTwoStages, SumsAreThoseOfTheFormats) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  constexpr WeightKind kind = WeightKind::fp8_block;
  for (const Case& wanted :
       {Case{kind, false, 64, 128, {1}, TokenScales::by_128}, Case{kind, false, 448, 320, {3, 0, 17}, TokenScales::by_128},
        Case{kind, false, 640, 512, {65, 9}, TokenScales::by_128, ScaleFormat::f32},
        Case{kind, true, 192, 320, {9, 0, 33, 1}, TokenScales::by_128}, Case{kind, false, 192, 192, {130}, TokenScales::by_32}}) {
    Random random(seed);
    const Inputs in(random, wanted);
    check_sums<SmallInTwo>(in, seed, Products::at_wait);
    check_sums<SmallInTwo>(in, seed + 1, Products::at_issue);
    check_sums<LargeInTwo>(in, seed + 2, Products::at_wait);
    check_sums<LargeInTwo>(in, seed + 3, Products::at_issue);
  }
}

}  // namespace
}  // namespace heddle::sm90
