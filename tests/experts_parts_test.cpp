// Parts of an expert, as the fused layer's tasks are cut, put together again: every bit is that of a whole call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "experts/host/parts.hpp"
#include "experts_support.hpp"
#include "heddle/error.hpp"
#include "heddle/experts.hpp"

namespace heddle {
namespace {

using testing::Layer;
using testing::OwnedRows;
using testing::pick;
using testing::Random;
using testing::random_options;
using testing::size;

constexpr bf16 untouched{0xBEEF};

/// Activations [count, D] with their scales, gathered from parts in any order.
struct Activations {
  std::vector<std::byte> values, scales;
  RowView view;
};

Activations gather_parts(const HostExperts& experts, const RowView& rows, int count, const float* weights, int expert,
                         Random& random) {
  const ExpertOptions& options = experts.options();
  const auto bytes = size(options.activation == Activation::fp8 ? 1 : 2);
  const auto scale = size(options.quantisation.scale == ScaleFormat::f32 ? 4 : 1);
  const int group = options.quantisation.group;
  Activations whole;
  whole.view.format = options.activation;
  whole.view.value_stride = size(experts.intermediate()) * bytes;
  whole.view.scale_stride = size((experts.intermediate() + group - 1) / group) * scale;
  whole.values.resize(size(count) * whole.view.value_stride);
  whole.scales.resize(size(count) * whole.view.scale_stride);
  std::vector<int> parts;
  for (int part = 0; part * activation_part < experts.intermediate(); ++part) parts.push_back(part);
  std::shuffle(parts.begin(), parts.end(), random);
  for (const int part : parts) {
    const int columns = std::min(activation_part, experts.intermediate() - part * activation_part);
    const RowView made = experts.activations(rows, count, weights, expert, part);
    for (std::size_t row = 0; row < size(count); ++row) {
      std::memcpy(whole.values.data() + row * whole.view.value_stride + size(part * activation_part) * bytes,
                  made.values + row * made.value_stride, size(columns) * bytes);
      if (options.activation == Activation::bf16) continue;
      std::memcpy(whole.scales.data() + row * whole.view.scale_stride + size(part * activation_part / group) * scale,
                  made.scales + row * made.scale_stride, size((columns + group - 1) / group) * scale);
    }
  }
  whole.view.values = whole.values.data();
  whole.view.scales = whole.scales.data();
  return whole;
}

TEST(Parts, PutTogetherGiveTheBitsOfAWholeCall) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    const ExpertOptions options = random_options(random);
    const int count = pick(random, 1, 60);
    const int expert = pick(random, 0, 2);
    const Layer layer(random, 3, 64 * pick(random, 1, 10), 64 * pick(random, 1, 7), testing::all_kinds[round % 5]);
    const OwnedRows rows = testing::random_rows(random, count, layer.hidden, options.activation, options.quantisation);
    std::vector<float> weights;
    for (int i = 0; i < count; ++i) weights.push_back(static_cast<float>(pick(random, 1, 100)) / 50.0f);
    const HostExperts experts = layer.experts(options);
    const auto hidden = size(layer.hidden);

    std::vector<int> begins(3, 0), counts(3, 0);
    counts[size(expert)] = count;
    std::vector<bf16> want(size(count) * hidden, untouched);
    experts.contiguous(rows.view, begins, counts, weights.data(), {want.data()});

    const Activations whole = gather_parts(experts, rows.view, count, weights.data(), expert, random);
    std::vector<bf16> have(size(count) * hidden, untouched);
    for (int first = 0; first < layer.hidden; first += result_part)
      experts.results(whole.view, count, expert, first / result_part, {have.data() + first, hidden});
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(want[i].bits, have[i].bits) << "round " << round << ", row " << i / hidden << ", column " << i % hidden;
    }
  }
}

TEST(Parts, ThoseThatThereAreNotAreRefused) {
  Random random(3);
  const Layer layer(random, 2, 320, 192, WeightKind::bf16);
  const HostExperts experts = layer.experts({});
  const OwnedRows rows = testing::random_rows(random, 1, layer.hidden, Activation::fp8, {});
  std::vector<bf16> out(size(layer.hidden));
  EXPECT_THROW(experts.activations(rows.view, 1, nullptr, 2, 0), InputError);
  EXPECT_THROW(experts.activations(rows.view, 1, nullptr, 0, 2), InputError);
  EXPECT_THROW(experts.results(rows.view, 1, 0, 2, {out.data(), size(layer.hidden)}), InputError);
  EXPECT_THROW(experts.results(rows.view, 1, -1, 0, {out.data(), size(layer.hidden)}), InputError);
}

// Tasks have a few rows each: neighbours change nothing.
TEST(Parts, ARowsBitsDoNotDependOnItsBlock) {
  Random random(11);
  const Layer layer(random, 1, 320, 192, WeightKind::mxfp4);
  const ExpertOptions options;
  const HostExperts experts = layer.experts(options);
  const OwnedRows rows = testing::random_rows(random, 40, layer.hidden, options.activation, options.quantisation);
  const RowView all = experts.activations(rows.view, 40, nullptr, 0, 1);
  const std::vector<std::byte> want(all.values, all.values + 40 * all.value_stride);
  for (int first = 0; first < 40; first += 7) {
    RowView some = rows.view;
    some.values += size(first) * some.value_stride;
    some.scales += size(first) * some.scale_stride;
    const int count = std::min(7, 40 - first);
    const RowView made = experts.activations(some, count, nullptr, 0, 1);
    EXPECT_EQ(std::memcmp(made.values, want.data() + size(first) * made.value_stride, size(count) * made.value_stride), 0) << first;
  }
}

}  // namespace
}  // namespace heddle
