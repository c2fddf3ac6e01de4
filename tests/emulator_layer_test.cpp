// The small kernels of a layer on GPUs, run thread by thread on the host: widened rows against the rules of the formats, and what
// may not be written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "emulator/device.hpp"
#include "formats/rows.hpp"
#include "signal/worker.hpp"

#undef __shared__
#define __shared__ static
inline float __fmul_rn(float a, float b) { return a * b; }
#include "layer/layer_kernels.cuh"

namespace heddle::layer_kernels {
namespace {

using Random = std::mt19937_64;

std::uint64_t announced_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

std::vector<bf16> draw_values(Random& random, std::size_t count) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(count);
  for (bf16& value : values) value = to_bf16(normal(random) * std::exp2(static_cast<float>(pick(random, -12, 12))));
  return values;
}

constexpr bf16 untouched{0xABCD};

/// Rows as they arrive, a stride with other things between them; and what they are as bf16.
struct ArrivedRows {
  RowFormat wire;
  std::size_t stride;
  std::vector<std::byte> bytes;

  ArrivedRows(Random& random, const RowFormat& format, int rows) : wire(format), stride(format.row_bytes() + 48) {
    bytes.assign(static_cast<std::size_t>(rows) * stride, std::byte{0x5A});
    for (int row = 0; row < rows; ++row) {
      const std::vector<bf16> values = draw_values(random, static_cast<std::size_t>(format.hidden));
      quantise_row(values.data(), format, bytes.data() + static_cast<std::size_t>(row) * stride);
    }
  }
  std::vector<bf16> widened(int row) const {
    std::vector<bf16> values(static_cast<std::size_t>(wire.hidden));
    convert_row(bytes.data() + static_cast<std::size_t>(row) * stride, wire, reinterpret_cast<std::byte*>(values.data()),
                {Wire::bf16, wire.hidden, {}, 1.0f});
    return values;
  }
};

const RowFormat wires[] = {{Wire::fp8, 448, {128, ScaleFormat::ue8m0}, 1.0f},
                           {Wire::fp8, 320, {32, ScaleFormat::f32}, 1.0f},
                           {Wire::nvfp4, 64, {}, 1.0f},
                           {Wire::nvfp4, 576, {}, 1.0f}};

/// The rows that `is_real` says are widened, all others as they were.
template <class IsReal>
void expect_widened(const ArrivedRows& from, const std::vector<bf16>& to, IsReal is_real) {
  const auto hidden = static_cast<std::size_t>(from.wire.hidden);
  for (std::size_t row = 0; row < to.size() / hidden; ++row) {
    const std::vector<bf16> want =
        is_real(static_cast<int>(row)) ? from.widened(static_cast<int>(row)) : std::vector<bf16>(hidden, untouched);
    for (std::size_t i = 0; i < hidden; ++i) {
      ASSERT_EQ(to[row * hidden + i].bits, want[i].bits) << "row " << row << ", column " << i;
    }
  }
}

template <class Kernel>
void launch(Random& random, int ctas, const Kernel& kernel) {
  emulator::launch({ctas, threads, static_cast<unsigned>(random())}, kernel);
}

TEST(EmulatorLayer, RowsByExpertAreWidenedWithinTheirRoom) {
  Random random(announced_seed());
  for (const RowFormat& wire : wires) {
    constexpr int room = 40;
    const ArrivedRows rows(random, wire, room);
    std::vector<bf16> to(static_cast<std::size_t>(room) * static_cast<std::size_t>(wire.hidden), untouched);
    // The third run ends outside, as behind a dispatch that was given up; the last one has no rows.
    const std::vector<std::int32_t> begins{0, 13, 36, 20}, counts{9, 3, 1000, -4};
    WidenCall call;
    call.rows = rows.bytes.data();
    call.row_stride = rows.stride;
    call.wire = wire;
    call.to = to.data();
    call.room = room;
    call.experts = 4;
    call.begins = begins.data();
    call.counts = counts.data();
    for (unsigned expert = 0; expert < 4; ++expert) {
      launch(random, pick(random, 1, 3), [&] {
        blockIdx.y = expert;
        wire.wire == Wire::fp8 ? widen_by_expert<Wire::fp8>(call) : widen_by_expert<Wire::nvfp4>(call);
      });
    }
    blockIdx.y = 0;
    expect_widened(rows, to, [](int row) { return row < 9 || (row >= 13 && row < 16) || row >= 36; });
  }
}

TEST(EmulatorLayer, RoutedRowsWithALocalExpertAreWidened) {
  Random random(announced_seed());
  for (const RowFormat& wire : wires) {
    for (const int topk : {1, 5, 40}) {
      constexpr int room = 23;
      const ArrivedRows rows(random, wire, room);
      std::vector<bf16> to(static_cast<std::size_t>(room) * static_cast<std::size_t>(wire.hidden), untouched);
      std::vector<std::int32_t> ids(static_cast<std::size_t>(room * topk), -1);
      std::vector<bool> real(room, false);
      for (int row = 0; row < room; ++row) {
        if (pick(random, 0, 1) == 0) continue;
        ids[static_cast<std::size_t>(row * topk + pick(random, 0, topk - 1))] = pick(random, 0, 3);
        real[static_cast<std::size_t>(row)] = true;
      }
      WidenCall call;
      call.rows = rows.bytes.data();
      call.row_stride = rows.stride;
      call.wire = wire;
      call.to = to.data();
      call.room = room;
      call.local_ids = ids.data();
      call.topk = topk;
      launch(random, pick(random, 1, 4),
             [&] { wire.wire == Wire::fp8 ? widen_routed<Wire::fp8>(call) : widen_routed<Wire::nvfp4>(call); });
      expect_widened(rows, to, [&](int row) { return real[static_cast<std::size_t>(row)]; });
    }
  }
}

TEST(EmulatorLayer, RunsOutsideOfTheirRoomAreEmpty) {
  Random random(announced_seed());
  constexpr std::int32_t huge = 0x7FFFFFFF;
  const std::vector<std::int32_t> begins{0, 60, 64, 65, -1, 10, huge, huge, 3};
  const std::vector<std::int32_t> counts{64, 5, 0, 0, 4, -1, 2, huge, 0};
  const std::vector<std::int32_t> begins_wanted{0, 0, 64, 0, 0, 0, 0, 0, 3}, counts_wanted{64, 0, 0, 0, 0, 0, 0, 0, 0};
  std::vector<std::int32_t> begins_out(begins.size() + 1, -7), counts_out(begins.size() + 1, -7);
  RunsCall call{begins.data(), counts.data(), static_cast<int>(begins.size()), 64, begins_out.data(), counts_out.data()};
  launch(random, 1, [&] { limit_runs(call); });
  EXPECT_EQ(begins_out.back(), -7) << "written behind the last expert";
  EXPECT_EQ(counts_out.back(), -7) << "written behind the last expert";
  begins_out.pop_back();
  counts_out.pop_back();
  EXPECT_EQ(begins_out, begins_wanted);
  EXPECT_EQ(counts_out, counts_wanted);
}

TEST(EmulatorLayer, TheGateOfEveryTokenThatIsThere) {
  Random random(announced_seed());
  for (const int hidden : {64, 192, 576}) {
    for (const int tokens : {0, 1, 9, 50}) {
      const auto size = static_cast<std::size_t>(hidden);
      const std::vector<bf16> rows = draw_values(random, 50 * size);
      std::vector<float> gate(size), factors(51, -7.0f);
      std::normal_distribution<float> normal(0.0f, 0.05f);
      for (float& value : gate) value = normal(random);
      GateCall call{rows.data(), hidden, &tokens, 50, gate.data(), factors.data()};
      launch(random, pick(random, 1, 3), [&] { gate_tokens(call); });
      for (int token = 0; token < 51; ++token) {
        const float got = factors[static_cast<std::size_t>(token)];
        if (token >= tokens) {
          ASSERT_EQ(got, -7.0f) << "token " << token << " of " << tokens;
          continue;
        }
        double sum = 0, magnitude = 0;
        for (std::size_t i = 0; i < size; ++i) {
          const double term = static_cast<double>(to_float(rows[static_cast<std::size_t>(token) * size + i])) * gate[i];
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(got, 1.0 / (1.0 + std::exp(-sum)), 1e-6 * (1.0 + magnitude)) << "token " << token << " of " << tokens;
      }
    }
  }
}

TEST(EmulatorLayer, NumbersAreStored) {
  Random random(announced_seed());
  std::vector<int> to(4, -7);
  NumbersCall call;
  call.to = to.data();
  call.count = 3;
  for (int i = 0; i < NumbersCall::most; ++i) call.values[i] = 10 + i;
  emulator::launch({1, NumbersCall::most, 1}, [&] { store_numbers(call); });
  EXPECT_EQ(to, (std::vector<int>{10, 11, 12, -7}));
}

/// Tokens of the passes of a split call: ranks that have run out have none, too many stay too many.
TEST(EmulatorLayer, TokensOfAPass) {
  const std::vector<int> tokens{0, 3, 4, 5, 9, 12, -1};
  const auto pass = [&](int first, bool last) {
    std::vector<int> to(tokens.size() + 1, -7);
    PassCall call;
    for (std::size_t i = 0; i < tokens.size(); ++i) call.tokens[i] = &tokens[i];
    call.to = to.data();
    call.count = static_cast<int>(tokens.size());
    call.first = first;
    call.most = 4;
    call.last = last;
    emulator::launch({1, PassCall::most_ranks, 1}, [&] { count_pass(call); });
    return to;
  };
  EXPECT_EQ(pass(0, false), (std::vector<int>{0, 3, 4, 4, 4, 4, -1, -7}));
  EXPECT_EQ(pass(4, false), (std::vector<int>{0, 0, 0, 1, 4, 4, -1, -7}));
  EXPECT_EQ(pass(8, true), (std::vector<int>{0, 0, 0, 0, 1, 4, -1, -7}));
  EXPECT_EQ(pass(8, true)[5], 4) << "12 tokens end in a third pass of 4";
}

}  // namespace
}  // namespace heddle::layer_kernels
