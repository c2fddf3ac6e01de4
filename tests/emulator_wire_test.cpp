// Results in the format of a combine wire, as the fused kernel's epilogues leave them, run thread by thread on the host: the bytes
// of rows that are quantised as a whole, and nothing beside them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulator/device.hpp"
// Compiled for the host with the emulator's headers in the place of CUDA's and CuTe's.
#include "mega/sm90/large_wire.cuh"

#include "emulator/emulator.hpp"
#include "experts/sm90/launch.hpp"
#include "formats/rows.hpp"

namespace heddle::sm90 {
namespace {

std::size_t size(int value) { return static_cast<std::size_t>(value); }

/// Results [rows, hidden] and the rows they go to, with a row and some bytes more that are nobody's.
struct Results {
  RowFormat format;
  int rows;
  std::vector<float> values;
  std::size_t stride;
  std::vector<std::byte> stored;

  Results(std::mt19937& random, const RowFormat& of, int count)
      : format(of), rows(count), values(size(count * of.hidden)), stride(of.row_bytes() + 32), stored(size(count + 1) * stride) {
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = normal(random) * std::exp2(static_cast<float>(random() % 24) - 12.0f);
      if (random() % 50 == 0) values[i] = -0.0f;
      if (random() % 400 == 0) values[i] = std::numeric_limits<float>::quiet_NaN();
      if (random() % 400 == 0) values[i] = std::numeric_limits<float>::infinity();
      if (random() % 7 == 0) values[i] = std::exp2(std::round(values[i]));  // ties between codes
    }
    for (int row = 0; row < count; ++row) {  // a group of zeros
      for (int i = 0; i < 64; ++i) values[size(row * of.hidden + i)] = row % 3 == 0 ? 0.0f : values[size(row * of.hidden + i)];
    }
    std::fill(stored.begin(), stored.end(), std::byte{0xAB});
  }

  float value(int row, int column) const {
    return row < rows && column < format.hidden ? values[size(row * format.hidden + column)] : NAN;
  }
  bf16* place(int row) { return reinterpret_cast<bf16*>(stored.data() + size(row) * stride); }

  /// Or as they were, where nothing was stored.
  void expect_quantised(bool were_stored = true) const {
    std::vector<bf16> rounded(size(format.hidden));
    for (int row = 0; row <= rows; ++row) {
      std::vector<std::byte> expected(stride, std::byte{0xAB});
      if (row < rows && were_stored) {
        for (int i = 0; i < format.hidden; ++i) rounded[size(i)] = to_bf16(value(row, i));
        std::vector<std::byte> whole(format.row_bytes());
        quantise_row(rounded.data(), format, whole.data());
        std::memcpy(expected.data(), whole.data(), format.value_bytes());
        std::memcpy(expected.data() + format.scale_offset(), whole.data() + format.scale_offset(), format.scale_bytes());
      }
      for (std::size_t i = 0; i < stride; ++i) {
        ASSERT_EQ(static_cast<int>(stored[size(row) * stride + i]), static_cast<int>(expected[i]))
            << "row " << row << ", byte " << i;
      }
    }
  }
};

alignas(1024) std::byte memory[most_shared_bytes];

/// As a task of every tile has them, one after the other; kernel(plan, task) by every math thread.
template <class Shape, class Kernel>
void for_tiles(const Results& results, unsigned seed, const Kernel& kernel) {
  std::memset(memory, 0xFF, sizeof memory);
  const WeightPlan plan{Shape::kind, false, false, results.format.hidden, 128};
  emulator::launch({1, Shape::math_threads, seed, emulator::Products::at_wait}, [&] {
    for (int tile = 0; tile < plan.tiles(); ++tile) {
      Task task;
      task.tile = tile;
      task.rows = results.rows;
      kernel(plan, task);
      cutlass::arch::NamedBarrier::sync(Shape::math_threads, 1);
    }
  });
}

struct RowsOf {
  Results& results;
  bf16* of(int, int token, bool) const { return results.place(token); }
  bf16* operator()(int token) const { return results.place(token); }
};

template <class Shape, int tokens>
void check_small(std::mt19937& random, const RowFormat& format, int rows, bool stores = true) {
  Results results(random, format, rows);
  auto& shared = *reinterpret_cast<Shared<Shape>*>(memory);
  for_tiles<Shape>(results, random(), [&](const WeightPlan& plan, const Task& task) {
    if (task.tile == 0) SharedScales<Shape>::begin(shared);
    const int thread = static_cast<int>(threadIdx.x);
    const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
    Sums<Shape, tokens> sums;
    for (int slab = 0; slab < Shape::slabs; ++slab) {
      for (int i = 0; i < tokens / 2; ++i) {
        const int column =
            (task.tile * tile_slabs + me.first_slab + slab) * slab_rows + 16 * me.warp() + 8 * (i % 4 / 2) + me.row();
        sums.slab[slab][i] = results.value(8 * (i / 4) + me.token() + i % 2, column);
      }
    }
    WireStore<Shape, tokens>(shared, format, plan, task, me, stores).run(RowsOf{results}, sums);
  });
  results.expect_quantised(stores);
}

/// Rows without factors of their own.
struct NoFactors {
  template <int values>
  void multiply(float*, int) const {}
};

template <class Shape, int pieces>
void check_large(std::mt19937& random, const RowFormat& format, int rows) {
  Results results(random, format, rows);
  auto& shared = *reinterpret_cast<Shared<Shape>*>(memory);
  for_tiles<Shape>(results, random(), [&](const WeightPlan& plan, const Task& task) {
    const LargePosition me(pieces == 2);
    LargeSums<pieces> sums;
    for (int p = 0; p < pieces; ++p) {
      for (int i = 0; i < 64; ++i) {
        const int slab = (me.first_piece + p) * slabs_a_piece;
        const int column = (task.tile * tile_slabs + slab) * slab_rows + 8 * (i / 4) + me.column() + i % 2;
        sums.piece[p][i] = results.value(me.token() + 8 * (i % 4 / 2), column);
      }
    }
    LargeWireStore<Shape, pieces>(shared, RowsOf{results}, format, plan, task, me).run(sums, NoFactors{});
  });
  results.expect_quantised();
}

std::vector<RowFormat> formats() {
  std::vector<RowFormat> all;
  for (const int hidden : {64, 256, 320, 448}) {  // whole tiles; one slab of a tile, three of them
    all.push_back({Wire::fp8, hidden, {128, ScaleFormat::ue8m0}, 1.0f});
    all.push_back({Wire::fp8, hidden, {128, ScaleFormat::f32}, 1.0f});
    all.push_back({Wire::nvfp4, hidden, {128, ScaleFormat::ue8m0}, 1.0f});
  }
  return all;
}

template <WeightKind kind>
void check_kind(unsigned seed) {
  std::mt19937 random(seed);
  using Small = SmallBlocks<kind, true>;
  using Large = LargeBlocks<kind, true>;
  for (const RowFormat& format : formats()) {
    SCOPED_TRACE(::testing::Message() << "kind " << static_cast<int>(kind) << ", seed " << seed << ", wire "
                                      << static_cast<int>(format.wire) << ", hidden " << format.hidden);
    check_small<Small, 8>(random, format, 5);
    check_small<Small, 32>(random, format, 27);
    check_small<Small, 16>(random, format, 16, false);
    if constexpr (Large::tokens_first) {
      check_large<Large, 1>(random, format, 37);
      check_large<Large, 2>(random, format, 101);
    } else {
      check_small<Large, 64>(random, format, 60);
      check_small<Large, Large::most_tokens>(random, format, Large::most_tokens - 3);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(WireStore, HasTheBytesOfRowsThatAreQuantisedAsAWhole) {
  const unsigned seed = std::random_device{}();
  check_kind<WeightKind::mxfp4>(seed);
  check_kind<WeightKind::fp8_block>(seed + 1);
  check_kind<WeightKind::bf16>(seed + 2);
}

}  // namespace
}  // namespace heddle::sm90
