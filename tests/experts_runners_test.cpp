// The three runners: equal in every bit to one another, and careful with what is not theirs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "experts_support.hpp"
#include "heddle/error.hpp"
#include "heddle/experts.hpp"

namespace heddle {
namespace {

using testing::bits_of;
using testing::Layer;
using testing::OwnedRows;
using testing::pick;
using testing::Random;
using testing::random_options;
using testing::Routing;
using testing::size;

constexpr bf16 untouched{0xBEEF};

/// The same pairs laid out for each runner.
TEST(Runners, ContiguousMaskedAndRoutedAgree) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 20; ++round) {
    ExpertOptions options = random_options(random);
    const int experts = pick(random, 1, 6);
    const int topk = pick(random, 1, 6);
    const int count = pick(random, 1, 60);
    const Layer layer(random, experts, 64 * pick(random, 1, 6), 64 * pick(random, 1, 6), testing::all_kinds[round % 5]);
    const OwnedRows rows = testing::random_rows(random, count, layer.hidden, options.activation, options.quantisation);
    const Routing routing(random, count, topk, experts);
    const int hidden = layer.hidden;
    std::vector<bf16> slots(size(count * topk * hidden), untouched);
    layer.experts(options).routed(rows.view, count, topk, routing.ids.data(), routing.weights.data(), RoutedOutput::slots,
                                  {slots.data()});

    // Copies of the rows: in aligned runs, and in blocks of `count` rows an expert, each in shuffled order.
    std::vector<std::vector<int>> choices(size(experts));
    for (int choice = 0; choice < count * topk; ++choice) {
      if (routing.ids[size(choice)] >= 0) {
        choices[size(routing.ids[size(choice)])].push_back(choice);
      }
    }
    options.row_block = pick(random, 8, 256);
    options.activation_grid = ActivationGrid::padded;
    for (const bool masked : {false, true}) {
      std::vector<int> begins;
      std::vector<int> counts;
      std::vector<int> choice_of;  // of a row; -1 for padding
      for (std::vector<int>& own : choices) {
        std::shuffle(own.begin(), own.end(), random);
        begins.push_back(static_cast<int>(choice_of.size()));
        counts.push_back(static_cast<int>(own.size()));
        choice_of.insert(choice_of.end(), own.begin(), own.end());
        choice_of.resize(masked ? size(begins.back() + count) : (choice_of.size() + 127) / 128 * 128, -1);
      }
      const std::size_t stride = rows.view.value_stride;
      std::vector<std::byte> copies(choice_of.size() * stride, std::byte{0x7F});  // padding: NaN, never to be read
      std::vector<float> weights(choice_of.size(), std::nanf(""));
      for (std::size_t row = 0; row < choice_of.size(); ++row) {
        if (choice_of[row] >= 0) {
          std::memcpy(copies.data() + row * stride, rows.bytes.data() + size(choice_of[row] / topk) * stride, stride);
          weights[row] = routing.weights[size(choice_of[row])];
        }
      }
      RowView view = rows.view;
      view.values = copies.data();
      view.scales = view.scales == nullptr ? nullptr : copies.data() + (rows.view.scales - rows.bytes.data());
      std::vector<bf16> out(choice_of.size() * size(hidden), untouched);
      ExpertReport report;
      if (masked) {
        layer.experts(options).masked(view, count, counts, weights.data(), {out.data()}, &report);
      } else {
        layer.experts(options).contiguous(view, begins, counts, weights.data(), {out.data()}, &report);
      }
      int real = 0;
      for (std::size_t row = 0; row < choice_of.size(); ++row) {
        const auto got = out.begin() + static_cast<std::ptrdiff_t>(row) * hidden;
        if (choice_of[row] < 0) {
          ASSERT_TRUE(std::all_of(got, got + hidden, [](bf16 value) { return value.bits == untouched.bits; }))
              << "padding was written";
          continue;
        }
        ++real;
        const auto expected = slots.begin() + static_cast<std::ptrdiff_t>(choice_of[row]) * hidden;
        ASSERT_TRUE(std::equal(got, got + hidden, expected, [](bf16 a, bf16 b) { return a.bits == b.bits; }))
            << (masked ? "masked" : "contiguous") << " round " << round << " row " << row << " choice " << choice_of[row];
      }
      EXPECT_EQ(report.rows, real);
      EXPECT_EQ(report.activation_blocks - report.empty_blocks, real);
      EXPECT_EQ(report.activation_blocks, masked ? experts * count : real);
    }
  }
}

TEST(Runners, SlotsAreSummedInChoiceOrder) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 10; ++round) {
    const ExpertOptions options = random_options(random);
    const int count = pick(random, 1, 20);
    const int topk = pick(random, 1, 8);
    const Layer layer(random, 5, 128, 64, WeightKind::mxfp4);
    const OwnedRows rows = testing::random_rows(random, count, 128, options.activation, options.quantisation);
    const Routing routing(random, count, topk, 5);
    const HostExperts experts = layer.experts(options);
    const std::size_t stride = 200;  // wider than a row
    std::vector<bf16> slots(size(count * topk) * stride, untouched);
    std::vector<bf16> sums(size(count) * stride, untouched);
    experts.routed(rows.view, count, topk, routing.ids.data(), routing.weights.data(), RoutedOutput::slots, {slots.data(), stride});
    experts.routed(rows.view, count, topk, routing.ids.data(), routing.weights.data(), RoutedOutput::sum, {sums.data(), stride});
    for (int token = 0; token < count; ++token) {
      for (std::size_t i = 0; i < stride; ++i) {
        float sum = 0.0f;
        for (int choice = token * topk; choice < (token + 1) * topk; ++choice) {
          const bf16 slot = slots[size(choice) * stride + i];
          if (i >= 128 || routing.ids[size(choice)] < 0) {
            ASSERT_EQ(slot.bits, untouched.bits);
          } else {
            sum = options.weight_at == WeightAt::combine ? std::fma(routing.weights[size(choice)], to_float(slot), sum)
                                                         : sum + to_float(slot);
          }
        }
        ASSERT_EQ(sums[size(token) * stride + i].bits, i < 128 ? to_bf16(sum).bits : untouched.bits);
      }
    }
  }
}

TEST(Runners, DenseIsARoutedCallWithWeightOne) {
  Random random(21);
  const Layer layer(random, 2, 192, 320, WeightKind::fp8_block);
  const OwnedRows rows = testing::random_rows(random, 33, 192, Activation::fp8, {});
  const HostExperts experts = layer.experts({});
  std::vector<bf16> dense(size(33 * 192));
  std::vector<bf16> routed(dense.size());
  const std::vector<int> ids(33, 1);
  const std::vector<float> ones(33, 1.0f);
  experts.dense(rows.view, 33, {dense.data()}, nullptr, 1);
  experts.routed(rows.view, 33, 1, ids.data(), ones.data(), RoutedOutput::sum, {routed.data()});
  EXPECT_EQ(bits_of(dense), bits_of(routed));
}

TEST(Runners, NothingToDoIsOrdinary) {
  Random random(22);
  const Layer layer(random, 3, 64, 64, WeightKind::bf16);
  ExpertOptions options;
  options.activation = Activation::bf16;
  const HostExperts experts = layer.experts(options);
  const HostExperts none({}, 64, 64, options);
  const std::vector<int> zeros(3, 0);
  experts.contiguous({}, zeros, zeros, nullptr, {});
  experts.masked({}, 8, zeros, nullptr, {});
  experts.dense({}, 0, {});
  experts.routed({}, 0, 4, nullptr, nullptr, RoutedOutput::sum, {});
  none.contiguous({}, {}, {}, nullptr, {});
  const OwnedRows rows = testing::random_rows(random, 2, 64, Activation::bf16, {});
  const std::vector<int> foreign(6, -1);
  const std::vector<float> weights(6, 1.0f);
  for (const HostExperts* rank : {&experts, &none}) {
    std::vector<bf16> out(128, untouched);
    ExpertReport report;
    rank->routed(rows.view, 2, 3, foreign.data(), weights.data(), RoutedOutput::sum, {out.data()}, &report);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](bf16 value) { return value.bits == 0; }))
        << "zeros for tokens without own experts";
    EXPECT_EQ(report.rows, 0);
  }
}

TEST(Runners, RanksCallAtOnce) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Layer layer(random, 4, 128, 192, WeightKind::nvfp4);
  const OwnedRows rows = testing::random_rows(random, 40, 128, Activation::fp8, {});
  const Routing routing(random, 40, 3, 4);
  const auto run = [&](const HostExperts& experts) {
    std::vector<bf16> out(size(40 * 128));
    experts.routed(rows.view, 40, 3, routing.ids.data(), routing.weights.data(), RoutedOutput::sum, {out.data()});
    return bits_of(out);
  };
  const HostExperts shared = layer.experts({});
  const auto expected = run(shared);
  std::vector<std::vector<std::uint16_t>> results(8);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      const HostExperts own = layer.experts({});
      results[rank] = run(rank % 2 == 0 ? shared : own);
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  for (const auto& result : results) {
    EXPECT_EQ(result, expected);
  }
}

TEST(Runners, WrongArgumentsAreNamed) {
  Random random(23);
  const Layer layer(random, 2, 64, 128, WeightKind::bf16);
  EXPECT_THROW(HostExperts(layer.views, 64, 64, {}), InputError);
  EXPECT_THROW(HostExperts(layer.views, 96, 128, {}), InputError);
  ExpertOptions options;
  options.quantisation.group = 64;
  EXPECT_THROW(layer.experts(options), InputError);
  options.quantisation.group = 128;
  options.row_block = 300;
  EXPECT_THROW(layer.experts(options), InputError);
  options.row_block = 0;
  options.activation = Activation::bf16;
  const HostExperts experts = layer.experts(options);
  const OwnedRows fp8 = testing::random_rows(random, 4, 64, Activation::fp8, {});
  const OwnedRows rows = testing::random_rows(random, 4, 64, Activation::bf16, {});
  std::vector<bf16> out(size(4 * 64));
  EXPECT_THROW(experts.dense(fp8.view, 4, {out.data()}), InputError);
  EXPECT_THROW(experts.dense(rows.view, 4, {out.data()}, nullptr, 2), InputError);
  const std::vector<int> one{1};
  EXPECT_THROW(experts.masked(rows.view, 4, one, nullptr, {out.data()}), InputError);
  const std::vector<int> above{5, 0};
  EXPECT_THROW(experts.masked(rows.view, 4, above, nullptr, {out.data()}), InputError);
  const std::vector<int> ids{0, 2};
  const std::vector<float> weights(2, 1.0f);
  try {
    experts.routed(rows.view, 1, 2, ids.data(), weights.data(), RoutedOutput::sum, {out.data()});
    FAIL() << "a foreign id was accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("token 0, choice 1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace heddle
