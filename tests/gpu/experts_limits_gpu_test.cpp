// The experts of one GPU: what does not fit. Counts found on the GPU that are too large or negative, and arguments that are wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exchange_support.hpp"
#include "gpu/experts_bed.hpp"

namespace heddle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int hidden = 192, intermediate = 320;

/// Every configuration has its own kernels that read counts.
struct Configuration {
  DeviceRowBlocks blocks;
  bool fused;
  ActivationGrid grid;
};
constexpr Configuration configurations[] = {{DeviceRowBlocks::small, true, ActivationGrid::persistent},
                                            {DeviceRowBlocks::large, true, ActivationGrid::persistent},
                                            {DeviceRowBlocks::small, false, ActivationGrid::padded},
                                            {DeviceRowBlocks::large, false, ActivationGrid::persistent}};

class ExpertLimitsGpu : public ::testing::TestWithParam<Configuration> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  DeviceExpertsOptions device(int most_rows, int most_tokens = 0, int topk = 0) const {
    DeviceExpertsOptions out;
    out.most_rows = most_rows;
    out.most_tokens = most_tokens;
    out.topk = topk;
    out.row_blocks = GetParam().blocks;
    out.fused_activation = GetParam().fused;
    return out;
  }
  ExpertOptions options() const {
    ExpertOptions out;
    out.activation_grid = GetParam().grid;
    return out;
  }
  /// bf16 rows, so that the kernel which quantises them reads counts, too.
  OwnedRows rows(Random& random, int count) const { return random_rows(random, count, hidden, Activation::bf16, {}); }
};

/// Rows of the results that are `real`, against those of one expert's dense call.
void expect_rows_of(const std::vector<bf16>& got, const std::vector<bf16>& dense, int first, int count, const std::string& what) {
  const auto part = [&](const std::vector<bf16>& from) {
    return std::vector<bf16>(from.begin() + first * hidden, from.begin() + (first + count) * hidden);
  };
  expect_same_bits(part(got), part(dense), hidden, what);
}

TEST_P(ExpertLimitsGpu, ContiguousCountsThatDoNotFit) {
  Random random(test_seed());
  const Layer layer(random, 4, hidden, intermediate, WeightKind::mxfp4);
  const OwnedRows made = rows(random, 80);
  ExpertsBed roomy(layer, options(), device(80));
  ExpertsBed bed(layer, options(), device(45));
  const DeviceRows tokens(made);
  const Buffer<int> begin(0, std::vector<int>{0, 5, 30, 70});
  DeviceResults out(80, hidden);
  struct Counts {
    std::vector<int> counts, computed;
    const char* refused;
  };
  const Counts all[] = {
      {{-3, 20, 10, 5}, {0, 20, 10, 5}, "-3 rows for local expert 0"},
      {{5, 20, 40, 0}, {5, 20, 20, 0}, "40 rows for local expert 2"},
      {{0, 20, 40, 0}, {0, 20, 25, 0}, "40 rows for local expert 2"},
      {{0, 0, 2147483647, 0}, {0, 0, 45, 0}, "2147483647 rows for local expert 2"},
  };
  for (const Counts& one : all) {
    SCOPED_TRACE(one.refused);
    const Buffer<int> counts(0, one.counts);
    out.poison();
    bed.must_refuse = true;
    bed.experts.contiguous(tokens.view(), begin.data(), counts.data(), nullptr, out.rows(), bed.stream);
    bed.settle("contiguous counts that do not fit");
    EXPECT_THAT(bed.refusal, AllOf(HasSubstr(one.refused), HasSubstr("at most 45")));
    bed.must_refuse = false;
    bed.settle("the same, asked once more");
    constexpr int begins[] = {0, 5, 30, 70};
    const auto got = out.read("contiguous", [&](int row) {
      for (int e = 0; e < 4; ++e) {
        if (row >= begins[e] && row < begins[e] + one.computed[size(e)]) return true;
      }
      return false;
    });
    for (int e = 0; e < 4; ++e) {
      expect_rows_of(got, roomy.dense(made, e), begins[e], one.computed[size(e)], "expert " + std::to_string(e));
    }
    if (HasFailure()) return;
  }
  const Buffer<int> counts(0, std::vector<int>{5, 20, 10, 10});
  out.poison();
  bed.experts.contiguous(tokens.view(), begin.data(), counts.data(), nullptr, out.rows(), bed.stream);
  bed.settle("counts that fit exactly");
}

TEST_P(ExpertLimitsGpu, MaskedCountsAboveTheBlock) {
  Random random(test_seed());
  const Layer layer(random, 3, hidden, intermediate, WeightKind::mxfp4);
  const OwnedRows made = rows(random, 3 * 16);
  ExpertsBed bed(layer, options(), device(48));
  const DeviceRows tokens(made);
  DeviceResults out(48, hidden);
  const Buffer<int> counts(0, std::vector<int>{7, 19, 0});
  bed.must_refuse = true;
  bed.experts.masked(tokens.view(), 16, counts.data(), nullptr, out.rows(), bed.stream);
  bed.settle("a count above the block");
  EXPECT_THAT(bed.refusal, HasSubstr("19 rows for local expert 1"));
  bed.must_refuse = false;
  const auto got = out.read("masked", [](int row) { return row < 7 || (row >= 16 && row < 32); });
  expect_rows_of(got, bed.dense(made, 0), 0, 7, "expert 0");
  expect_rows_of(got, bed.dense(made, 1), 16, 16, "expert 1");
}

TEST_P(ExpertLimitsGpu, RoutedPairsBeyondTheRoom) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  constexpr int experts = 5, tokens = 40, topk = 3;
  const Layer layer(random, experts, hidden, intermediate, WeightKind::mxfp4);
  for (const WeightAt weight_at : {WeightAt::activation, WeightAt::combine}) {
    Batch batch(random, rows(random, tokens), topk, experts);
    ExpertOptions chosen = options();
    chosen.weight_at = weight_at;
    ExpertsBed roomy(layer, chosen, device(tokens * topk, tokens, topk));
    ExpertsBed bed(layer, chosen, device(50, tokens, topk));
    std::vector<bf16> slots = roomy.routed(batch, RoutedOutput::slots);
    // Pairs in the order of experts: the first 50 stay.
    int listed = 0;
    for (int expert = 0; expert < experts; ++expert) {
      for (int choice = 0; choice < batch.choices(); ++choice) {
        if (batch.ids[size(choice)] != expert || ++listed <= 50) continue;
        batch.ids[size(choice)] = -1;
        std::fill_n(slots.begin() + choice * hidden, hidden, bf16{poison_bits});
      }
    }
    ASSERT_GT(listed, 50);
    bed.must_refuse = true;
    expect_same_bits(bed.routed(batch, RoutedOutput::slots), slots, hidden, "slots");
    EXPECT_THAT(bed.refusal, HasSubstr("at most 50"));
    expect_same_bits(bed.routed(batch, RoutedOutput::sum), sums_of_slots(batch, slots, hidden, weight_at), hidden, "sums");
  }
}

TEST_P(ExpertLimitsGpu, DenseRowsBeyondTheCount) {
  Random random(test_seed());
  const Layer layer(random, 2, hidden, intermediate, WeightKind::mxfp4);
  const OwnedRows made = rows(random, 30);
  ExpertsBed bed(layer, options(), device(30));
  const DeviceRows tokens(made);
  for (const int here : {31, -1}) {
    DeviceResults out(30, hidden);
    const Buffer<int> count(0, std::vector<int>{here});
    bed.must_refuse = true;
    bed.experts.dense(tokens.view(), 20, out.rows(), bed.stream, 1, count.data());
    bed.settle("dense rows that do not fit");
    EXPECT_THAT(bed.refusal, HasSubstr(std::to_string(here) + " rows for local expert 1"));
    bed.must_refuse = false;
    const auto got = out.read("dense", [&](int row) { return here > 0 && row < 20; });
    if (here > 0) expect_rows_of(got, bed.dense(made, 1), 0, 20, "dense");
  }
}

std::string configuration_name(const ::testing::TestParamInfo<Configuration>& info) {
  const Configuration& one = info.param;
  return std::string(one.blocks == DeviceRowBlocks::small ? "small_" : "large_") + (one.fused ? "fused"
                                                                                    : one.grid == ActivationGrid::padded
                                                                                        ? "padded"
                                                                                        : "persistent");
}
INSTANTIATE_TEST_SUITE_P(All, ExpertLimitsGpu, ::testing::ValuesIn(configurations), configuration_name);

TEST(ExpertArgumentsGpu, NoExpertsAndNothingToDoAreLegal) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  const Batch batch(random, random_rows(random, 9, hidden, Activation::bf16, {}), 2, 1, std::vector<int>(18, -1));
  for (const int experts : {0, 2}) {
    SCOPED_TRACE(::testing::Message() << experts << " experts, tokens of others");
    const Layer layer(random, experts, hidden, intermediate, WeightKind::mxfp4);
    ExpertsBed bed(layer, {}, room_for(batch));
    const std::vector<bf16> sums = bed.routed(batch, RoutedOutput::sum);
    EXPECT_TRUE(std::all_of(sums.begin(), sums.end(), [](bf16 value) { return value.bits == 0; })) << "zeros without own experts";
    bed.routed(batch, RoutedOutput::slots);
    bed.experts.routed({}, 0, 1, nullptr, nullptr, RoutedOutput::sum, {}, bed.stream);
    bed.experts.masked({}, 0, nullptr, nullptr, {}, bed.stream);
    if (experts == 0) {
      bed.experts.contiguous({}, nullptr, nullptr, nullptr, {}, bed.stream);
    } else {
      bed.experts.dense({}, 0, {}, bed.stream);
    }
    bed.settle("nothing");
  }
}

/// What an InputError says; empty: none was thrown.
template <class Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(ExpertArgumentsGpu, WrongOptionsAreNamed) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const Layer layer(random, 2, hidden, intermediate, WeightKind::mxfp4);
  const auto made_with = [&](const auto& change) {
    ExpertOptions options;
    DeviceExpertsOptions device;
    device.most_rows = 8;
    change(options, device);
    return refused([&] { ExpertsBed bed(layer, options, device); });
  };
  EXPECT_EQ(made_with([](auto&, auto&) {}), "");
  EXPECT_THAT(made_with([](auto& options, auto&) { options.activation = Activation::bf16; }), HasSubstr("mxfp4"));
  EXPECT_THAT(made_with([](auto& options, auto&) { options.quantisation.group = 64; }), HasSubstr("groups of 64"));
  EXPECT_THAT(made_with([](auto& options, auto&) { options.clamp = -1.0f; }), HasSubstr("clamp -1"));
  EXPECT_THAT(made_with([](auto&, auto& device) { device.most_rows = -1; }), HasSubstr("most_rows -1"));
  EXPECT_THAT(made_with([](auto&, auto& device) { device.most_rows = (1 << 25) + 1; }), HasSubstr("most_rows 33554433"));
  EXPECT_THAT(made_with([](auto&, auto& device) { device.most_tokens = 5; }), HasSubstr("5 tokens with 0 choices"));
  EXPECT_THAT(made_with([](auto&, auto& device) { device.ctas = 100000; }), HasSubstr("100000 CTAs"));
  EXPECT_THAT(made_with([](auto&, auto& device) { device.device = 99; }), HasSubstr("GPU 99"));
  EXPECT_THAT(made_with([](auto&, auto& device) { device.slice_first = 32; }), HasSubstr("slice"));
}

TEST(ExpertArgumentsGpu, WrongCallsAreNamed) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const Layer layer(random, 2, hidden, intermediate, WeightKind::bf16);
  const Batch batch(random, random_rows(random, 6, hidden, Activation::bf16, {}), 2, 2);
  ExpertOptions options;
  options.activation = Activation::bf16;
  ExpertsBed bed(layer, options, room_for(batch));
  const DeviceRows tokens(batch.rows);
  const Buffer<int> numbers(0, std::vector<int>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  const DeviceResults out(12, hidden);
  const auto dense = [&](const RowView& rows, int count, const ResultRows& results, int expert = 0) {
    return refused([&] { bed.experts.dense(rows, count, results, bed.stream, expert); });
  };
  EXPECT_THAT(dense(tokens.view(), 13, out.rows()), HasSubstr("13 rows"));
  EXPECT_THAT(dense(tokens.view(), 6, out.rows(), 2), HasSubstr("expert 2"));
  EXPECT_THAT(dense(tokens.view(), 6, {}), HasSubstr("results"));
  EXPECT_THAT(dense(tokens.view(), 6, {out.rows().values, hidden - 8}), HasSubstr("184 values apart"));
  EXPECT_THAT(dense(tokens.view(), 6, {out.rows().values + 1, 0}), HasSubstr("multiple of 16"));
  RowView rows = tokens.view();
  rows.value_stride += 8;
  EXPECT_THAT(dense(rows, 6, out.rows()), HasSubstr("392 bytes apart"));
  rows = tokens.view();
  rows.format = Activation::fp8;
  EXPECT_THAT(dense(rows, 6, out.rows()), AllOf(HasSubstr("fp8"), HasSubstr("send bf16 rows")));
  const auto routed = [&](int count, int topk, const int* ids) {
    return refused(
        [&] { bed.experts.routed(tokens.view(), count, topk, ids, nullptr, RoutedOutput::slots, out.rows(), bed.stream); });
  };
  EXPECT_THAT(routed(7, 2, numbers.data()), HasSubstr("7 tokens"));
  EXPECT_THAT(routed(6, 3, numbers.data()), HasSubstr("3 choices"));
  EXPECT_THAT(routed(6, 2, nullptr), HasSubstr("local_ids is null"));
  const auto contiguous = [&](const int* begin, const int* counts) {
    return refused([&] { bed.experts.contiguous(tokens.view(), begin, counts, nullptr, out.rows(), bed.stream); });
  };
  EXPECT_THAT(contiguous(nullptr, numbers.data()), HasSubstr("row_begin is null"));
  EXPECT_THAT(contiguous(numbers.data(), nullptr), HasSubstr("row_count is null"));
  EXPECT_THAT(refused([&] { bed.experts.masked(tokens.view(), 3, nullptr, nullptr, out.rows(), bed.stream); }),
              HasSubstr("masked_m is null"));
  bed.settle("calls that were refused");
  out.read("results", [](int) { return false; });
}

}  // namespace
}  // namespace heddle::testing
