// Grouped products: each row's bits are those of its group's own product, whatever stands around it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "experts/host/gemm.hpp"
#include "experts/host/grouped.hpp"
#include "experts_support.hpp"
#include "heddle/error.hpp"

namespace heddle {
namespace {

using testing::all_kinds;
using testing::bits_of;
using testing::OwnedRows;
using testing::OwnedWeights;
using testing::pick;
using testing::Random;

/// Row by row, a product each.
std::vector<bf16> one_by_one(const RowView& rows, const std::vector<int>& groups, const std::vector<WeightMatrix>& weights,
                             Activation activation, const Quantisation& quantisation, std::vector<bf16> out) {
  TileEngine engine;
  Operand operand;
  const auto columns = static_cast<std::size_t>(weights[0].rows);
  for (std::size_t row = 0; row < groups.size(); ++row) {
    if (groups[row] < 0) continue;
    const int number = static_cast<int>(row);
    operand.pack(rows, &number, 1, weights[0].cols, activation, quantisation);
    engine.multiply(operand, weights[static_cast<std::size_t>(groups[row])], 0, {out.data() + row * columns, columns, nullptr});
  }
  return out;
}

TEST(GroupedProduct, IsEveryGroupsOwn) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  use_one_blas_thread();
  for (int round = 0; round < 40; ++round) {
    const int groups = pick(random, 1, 5), count = pick(random, 0, 300), n = pick(random, 1, 20) * 16, k = pick(random, 1, 6) * 64;
    const Quantisation quantisation{pick(random, 0, 1) == 0 ? 128 : 32,
                                    pick(random, 0, 1) == 0 ? ScaleFormat::f32 : ScaleFormat::ue8m0};
    const Activation activation = pick(random, 0, 1) == 0 ? Activation::fp8 : Activation::bf16;
    std::vector<OwnedWeights> owned;
    std::vector<WeightMatrix> weights;
    const WeightKind kind = all_kinds[pick(random, 0, 4)];
    for (int group = 0; group < groups; ++group) owned.push_back(testing::random_weights(random, kind, n, k));
    for (const OwnedWeights& one : owned) weights.push_back(one.view);
    const OwnedRows rows =
        testing::random_rows(random, count, k, pick(random, 0, 1) == 0 ? activation : Activation::bf16, quantisation);
    std::vector<int> group_of(static_cast<std::size_t>(count));
    for (int& group : group_of) group = pick(random, -1, groups - 1);
    const std::vector<bf16> before(static_cast<std::size_t>(count) * static_cast<std::size_t>(n), to_bf16(7.0f));
    std::vector<bf16> out = before;
    grouped_product(rows.view, group_of, weights, activation, quantisation, {out.data()});
    EXPECT_EQ(bits_of(out), bits_of(one_by_one(rows.view, group_of, weights, activation, quantisation, before)))
        << groups << " groups, " << count << " rows, " << n << " x " << k;
  }
}

TEST(GroupedProduct, SaysWhatDoesNotFit) {
  Random random(1);
  const OwnedWeights one = testing::random_weights(random, WeightKind::bf16, 64, 64),
                     other = testing::random_weights(random, WeightKind::bf16, 64, 128);
  const OwnedRows rows = testing::random_rows(random, 2, 64, Activation::fp8, {});
  std::vector<bf16> out(2 * 64);
  const auto refused = [&](std::vector<int> groups, std::vector<WeightMatrix> weights, Activation activation,
                           const Quantisation& how) {
    try {
      grouped_product(rows.view, groups, weights, activation, how, {out.data()});
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_THAT(refused({0, 1}, {one.view}, Activation::fp8, {}), ::testing::HasSubstr("row 1 is of group 1; it must be -1 to 0"));
  EXPECT_THAT(refused({0, -2}, {one.view}, Activation::fp8, {}), ::testing::HasSubstr("row 1 is of group -2"));
  EXPECT_THAT(refused({0, 0}, {one.view, other.view}, Activation::fp8, {}),
              ::testing::HasSubstr("group 1: the weight matrix is [64, 128]"));
  EXPECT_THAT(refused({0, 0}, {one.view}, Activation::bf16, {}),
              ::testing::HasSubstr("rows are fp8, but the activations are bf16"));
  EXPECT_THAT(refused({0, 0}, {one.view}, Activation::fp8, {64, ScaleFormat::f32}), ::testing::HasSubstr("groups of 64"));
}

}  // namespace
}  // namespace heddle
