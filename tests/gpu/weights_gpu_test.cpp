// Expert weights in GPU memory: laid out by the GPU as by the host, byte for byte, widened to the same registers, read back,
// updated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "exchange_support.hpp"
#include "experts/sm90/weights.hpp"
#include "experts/sm90/widen.hpp"
#include "experts_support.hpp"
#include "gpu/buffers.hpp"
#include "gpu/widen_slabs.hpp"
#include "heddle/error.hpp"

namespace heddle::sm90 {
namespace {

using heddle::testing::Layer;
using heddle::testing::OwnedWeights;
using heddle::testing::Random;
using heddle::testing::size;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// What the host lays an expert's matrix out as.
OrderedWeights expected(const WeightPlan& plan, const ExpertWeights& expert, const Range& slice) {
  const std::string names[] = {"first", "second"};
  const Range hidden{0, expert.gate.cols};
  if (plan.paired) {
    return order_weights(plan, {{stored_part(expert.gate, slice, hidden, "gate"), stored_part(expert.up, slice, hidden, "up")}},
                         names);
  }
  const StoredMatrix down = stored_part(expert.down, hidden, slice, "down");
  return order_weights(plan, {{down, down}}, names);
}

/// Registers of all slabs as load_slab gives them on the host.
std::vector<std::uint32_t> host_registers(const WeightPlan& plan, const std::byte* chunks) {
  std::vector<std::uint32_t> registers;
  with_kind(plan.kind, [&]<WeightKind kind>() {
    for (int slab = 0; slab < plan.slabs(); ++slab) {
      for (int step = 0; step < plan.steps(); ++step) {
        for (int thread = 0; thread < slab_threads; ++thread) {
          std::uint32_t a[slab_registers];
          load_slab<kind>(chunks + plan.slab_data(slab, step), chunks + plan.slab_scales(slab, step), thread, a);
          registers.insert(registers.end(), a, a + slab_registers);
        }
      }
    }
  });
  return registers;
}

void expect_registers(const WeightPlan& plan, const std::byte* device_chunks, const OrderedWeights& host) {
  const std::vector<std::uint32_t> want = host_registers(plan, host.chunks.data());
  const Buffer<std::uint32_t> registers(0, want.size());
  check(launch_widen(plan, device_chunks, registers.data()), "widening kernel");
  check(cudaDeviceSynchronize(), "widening kernel");
  const std::vector<std::uint32_t> got = registers.read();
  const auto [wanted, found] = std::mismatch(want.begin(), want.end(), got.begin());
  const auto at = static_cast<int>(wanted - want.begin());
  EXPECT_EQ(wanted, want.end()) << "slab " << at / slab_registers / slab_threads / plan.steps() << ", step "
                                << at / slab_registers / slab_threads % plan.steps() << ", thread "
                                << at / slab_registers % slab_threads << ", register " << at % slab_registers
                                << ": the GPU widens to " << std::hex << *found << ", the host to " << *wanted;
  registers.expect_guards("registers");
}

/// One matrix of one expert: bytes, row scales and registers.
void expect_matrix(const OrderedMatrix& matrix, int expert, const ExpertWeights& stored, const Range& slice) {
  const WeightPlan& plan = matrix.plan;
  SCOPED_TRACE(::testing::Message() << heddle::testing::name_of(plan.kind) << ", expert " << expert
                                    << (plan.paired ? ", gate and up" : ", down"));
  const OrderedWeights want = expected(plan, stored, slice);
  const std::byte* chunks = matrix.chunk(expert, 0, 0);
  const std::vector<std::byte> got = read(chunks, plan.bytes());
  const auto [wanted, found] = std::mismatch(want.chunks.begin(), want.chunks.end(), got.begin());
  ASSERT_EQ(wanted, want.chunks.end()) << "byte " << wanted - want.chunks.begin() << " of " << want.chunks.size() << " is "
                                       << static_cast<int>(*found) << ", the host has " << static_cast<int>(*wanted);
  if (plan.row_scales() > 0) {
    ASSERT_EQ(read(matrix.row_scales_of(expert), size(plan.row_scales())), want.row_scales);
  }
  expect_registers(plan, chunks, want);
}

/// Rows of values and scales of a part, copied out of the whole matrix.
void expect_stored(const StoredWeights& got, const WeightMatrix& whole, const Range& rows, const Range& cols, const char* what) {
  const StoredMatrix part = stored_part(whole, rows, cols, what);
  const StoredShape shape{whole.kind, rows.count, cols.count, whole.block_scale};
  ASSERT_EQ(got.values.size(), shape.value_bytes()) << what;
  ASSERT_EQ(got.scales.size(), shape.scale_bytes()) << what;
  EXPECT_EQ(got.view.tensor_scale, whole.tensor_scale) << what;
  for (int row = 0; row < rows.count; ++row) {
    ASSERT_EQ(std::memcmp(got.values.data() + size(row) * shape.value_pitch(), part.values + size(row) * part.value_pitch,
                          shape.value_pitch()),
              0)
        << what << ": values of row " << row << " are not what was stored";
  }
  for (int row = 0; row < shape.scale_rows(); ++row) {
    ASSERT_EQ(std::memcmp(got.scales.data() + size(row) * shape.scale_pitch(), part.scales + size(row) * part.scale_pitch,
                          shape.scale_pitch()),
              0)
        << what << ": scales, row " << row << ", are not what was stored";
  }
}

void expect_expert(const DeviceWeights& weights, int expert, const ExpertWeights& stored, const Range& slice) {
  expect_matrix(weights.gate_up(), expert, stored, slice);
  expect_matrix(weights.down(), expert, stored, slice);
  const Range hidden{0, weights.hidden()};
  const StoredExpert back = weights.read_back(expert, nullptr);
  expect_stored(back.gate, stored.gate, slice, hidden, "gate, read back");
  expect_stored(back.up, stored.up, slice, hidden, "up, read back");
  expect_stored(back.down, stored.down, hidden, slice, "down, read back");
}

/// Every finite code and, for the kinds that multiply on the way, scales from end to end: subnormal operands too.
void spread_scales(Random& random, OwnedWeights& weights) {
  const auto draw = [&](int low, int high) {
    for (std::byte& scale : weights.scales) scale = static_cast<std::byte>(heddle::testing::pick(random, low, high));
  };
  if (weights.view.kind == WeightKind::mxfp8) draw(20, 140);
  if (weights.view.kind == WeightKind::nvfp4) draw(0, 0x7E);
  if (weights.view.kind == WeightKind::mxfp4) draw(114, 125);
}

Layer random_layer(Random& random, int experts, int hidden, int intermediate, WeightKind kind) {
  Layer layer(random, experts, hidden, intermediate, kind);
  for (OwnedWeights& weights : layer.storage) spread_scales(random, weights);
  return layer;
}

std::string refusal(std::span<const ExpertWeights> experts, int hidden, int intermediate,
                    const DeviceWeightsOptions& options = {}) {
  try {
    const DeviceWeights weights(experts, hidden, intermediate, options);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

class WeightsGpu : public ::testing::TestWithParam<WeightKind> {};

TEST_P(WeightsGpu, LaidOutAsOnTheHostAndReadBack) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  struct Shape {
    int experts, hidden, intermediate;
  };
  for (const Shape shape : {Shape{3, 64, 64}, {2, 320, 192}, {1, 2880, 640}, {2, 640, 2304}}) {
    SCOPED_TRACE(::testing::Message() << "hidden " << shape.hidden << ", intermediate " << shape.intermediate);
    const Layer layer = random_layer(random, shape.experts, shape.hidden, shape.intermediate, GetParam());
    const DeviceWeights weights(layer.views, shape.hidden, shape.intermediate, {});
    ASSERT_EQ(weights.count(), shape.experts);
    for (int expert = 0; expert < shape.experts; ++expert) {
      expect_expert(weights, expert, layer.views[size(expert)], {0, shape.intermediate});
      if (HasFailure()) return;
    }
    EXPECT_EQ(weights.report().experts, shape.experts);
    EXPECT_GT(weights.report().seconds, 0);
    EXPECT_GE(weights.report().device_bytes, weights.report().stored_bytes);
  }
}

TEST_P(WeightsGpu, SlicesOfTheIntermediateSize) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Layer layer = random_layer(random, 2, 320, 448, GetParam());
  for (const Range slice : {Range{0, 128}, {128, 128}, {256, 192}}) {
    SCOPED_TRACE(::testing::Message() << "slice from " << slice.first << ", " << slice.count);
    DeviceWeightsOptions options;
    options.slice = slice;
    const DeviceWeights weights(layer.views, 320, 448, options);
    ASSERT_EQ(weights.intermediate(), slice.count);
    for (int expert = 0; expert < 2; ++expert) {
      expect_expert(weights, expert, layer.views[size(expert)], slice);
      if (HasFailure()) return;
    }
  }
}

TEST_P(WeightsGpu, UpdatedInPlace) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  const Layer before = random_layer(random, 3, 192, 320, GetParam());
  const Layer after = random_layer(random, 3, 192, 320, GetParam());
  DeviceWeights weights(before.views, 192, 320, {});
  const std::byte* place = weights.gate_up().chunks;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  weights.update(1, after.views[1], stream);
  check(cudaStreamSynchronize(stream), "update");
  check(cudaStreamDestroy(stream), "stream");
  EXPECT_EQ(weights.gate_up().chunks, place);
  EXPECT_EQ(weights.report().experts, 4);
  expect_expert(weights, 0, before.views[0], {0, 320});
  expect_expert(weights, 1, after.views[1], {0, 320});
  expect_expert(weights, 2, before.views[2], {0, 320});
  EXPECT_THROW(weights.update(3, after.views[0], nullptr), InputError);
}

std::string name_of(const ::testing::TestParamInfo<WeightKind>& kind) { return heddle::testing::name_of(kind.param); }
INSTANTIATE_TEST_SUITE_P(All, WeightsGpu, ::testing::ValuesIn(heddle::testing::all_kinds), name_of);

/// Makes the values of a group of 32 columns the largest there are and gives it a scale.
void set_group(OwnedWeights& weights, int row, int group, int scale) {
  const int groups = weights.view.cols / 32;
  weights.scales[size(row * groups + group)] = static_cast<std::byte>(scale);
  std::memset(weights.values.data() + size(row * groups + group) * 16, 0x77, 16);
}

TEST(WeightsGpuMxfp4, StepExponentsWhereSomeExpertNeedsThem) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  Layer layer(random, 3, 320, 128, WeightKind::mxfp4);
  set_group(layer.storage[3 * 1 + 1], 70, 9, 60);  // expert 1, up: columns 288..319 are a step with another half
  set_group(layer.storage[3 * 1 + 1], 70, 8, 61);
  const DeviceWeights weights(layer.views, 320, 128, {});
  EXPECT_TRUE(weights.gate_up().plan.step_exponents);
  EXPECT_FALSE(weights.down().plan.step_exponents);
  for (int expert = 0; expert < 3; ++expert) {
    expect_expert(weights, expert, layer.views[size(expert)], {0, 128});
    if (HasFailure()) return;
  }
}

TEST(WeightsGpuMxfp4, AnUpdateThatDoesNotFitChangesNothing) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const Layer layer(random, 2, 320, 128, WeightKind::mxfp4);
  Layer other(random, 2, 320, 128, WeightKind::mxfp4);
  set_group(other.storage[1], 70, 9, 60);
  set_group(other.storage[1], 70, 8, 61);
  DeviceWeights weights(layer.views, 320, 128, {});
  try {
    weights.update(1, other.views[0], nullptr);
    ADD_FAILURE() << "a row of more than 11 binades was accepted without step exponents";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("expert 1, up, row 70"), HasSubstr("without step exponents")));
  }
  for (int expert = 0; expert < 2; ++expert) expect_expert(weights, expert, layer.views[size(expert)], {0, 128});
  if (::testing::Test::HasFailure()) return;

  DeviceWeightsOptions room;
  room.step_exponents = true;
  DeviceWeights wide(layer.views, 320, 128, room);
  wide.update(1, other.views[0], nullptr);
  expect_expert(wide, 0, layer.views[0], {0, 128});
  expect_expert(wide, 1, other.views[0], {0, 128});
}

TEST(WeightsGpuRefusals, ByName) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  Layer layer(random, 2, 128, 192, WeightKind::mxfp4);
  EXPECT_EQ(refusal(layer.views, 128, 192), "");
  set_group(layer.storage[3 + 2], 100, 1, 80);  // expert 1, down
  set_group(layer.storage[3 + 2], 100, 2, 100);
  EXPECT_THAT(refusal(layer.views, 128, 192), AllOf(HasSubstr("expert 1, down, row 100, column 32"), HasSubstr("11")));
  set_group(layer.storage[3 + 2], 100, 1, 0xFF);
  EXPECT_THAT(refusal(layer.views, 128, 192), HasSubstr("expert 1, down, row 100, column 32: the scale is not a number"));

  Layer mixed(random, 2, 128, 192, WeightKind::mxfp4);
  const Layer bf16(random, 1, 128, 192, WeightKind::bf16);
  mixed.views[1].up = bf16.views[0].up;
  EXPECT_THAT(refusal(mixed.views, 128, 192), AllOf(HasSubstr("expert 1, up"), HasSubstr("bf16"), HasSubstr("mxfp4")));
  EXPECT_THAT(refusal(bf16.views, 192, 128), HasSubstr("expert 0, gate"));
  EXPECT_THAT(refusal({}, 100, 128), HasSubstr("multiples of 64"));

  DeviceWeightsOptions options;
  options.slice = {64, 128};
  const Layer blocks(random, 1, 128, 192, WeightKind::fp8_block);
  EXPECT_THAT(refusal(blocks.views, 128, 192, options), AllOf(HasSubstr("expert 0"), HasSubstr("multiples of 128")));
  options.slice = {128, 128};
  EXPECT_THAT(refusal(blocks.views, 128, 192, options), HasSubstr("inside"));
}

TEST(WeightsGpuRefusals, NoExpertsAreLegal) {
  SKIP_WITHOUT_GPU();
  const DeviceWeights weights({}, 128, 192, {});
  EXPECT_EQ(weights.count(), 0);
  EXPECT_EQ(weights.report().device_bytes, 0u);
}

}  // namespace
}  // namespace heddle::sm90
