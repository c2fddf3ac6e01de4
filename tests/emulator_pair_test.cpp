// Weights of a kind whose chunks are larger than the stages of the ring: the tile engine with mxfp4's memory multiplies fp8 block
// weights, thread by thread on the host. Sums are compared bit for bit with those said again from the definition of the formats.
#include <gtest/gtest.h>

#include <vector>

// A lane that fetches scales looks at the places of its own rows alone, which the compiler cannot see here.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "emulator_products.hpp"
#include "mega/sm90/pair_widener.cuh"
#pragma GCC diagnostic pop

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

// ---- Both kinds in turn, through the same rings -------------------------------------------------------------------------

/// A task of the first product, of the ring's own kind, or of the second.
struct MixedTask {
  bool second = false;
  Task task;
};

template <class Shape>
using SecondOf = InTwoStages<Shape, WeightKind::fp8_block>;

template <class Shape>
void multiply_small(Shared<Shape>& shared, const ProductCall (&calls)[2], const std::vector<MixedTask>& tasks) {
  using Second = SecondOf<Shape>;
  const int thread = static_cast<int>(threadIdx.x);
  const MathThread me{thread / warpgroup_threads * Shape::slabs, thread % warpgroup_threads};
  auto& second = reinterpret_cast<Shared<Second>&>(shared);
  RowFactors<Shape> factors(shared, me);
  RowFactors<Second> none(second, me);
  MathPosition<Shape> at;
  for (const MixedTask& one : tasks) {
    const ProductCall& call = calls[one.second ? 1 : 0];
    if (one.second) {
      MathPosition<Second> here{at.weights, at.rows};
      with_tile<Second>(one.task.rows, ProductMath<Second>{second, call, call.weights, me, none, here}, one.task);
      at = {here.weights, here.rows};
    } else {
      factors.fetch(call.weights, one.task);
      factors.turn();
      with_tile<Shape>(one.task.rows, ProductMath<Shape>{shared, call, call.weights, me, factors, at}, one.task);
    }
  }
}

template <class Shape>
void multiply_one_large(Shared<Shape>& shared, const ProductCall& call, const Task& task, LargeRings<Shape>& at, int& turn) {
  if (task.rows <= Shape::half_tokens) {
    compute_large<Shape, 1>(shared, call, call.weights, task, at, turn);
  } else {
    compute_large<Shape, 2>(shared, call, call.weights, task, at, turn);
  }
}

template <class Shape>
void multiply_large(Shared<Shape>& shared, const ProductCall (&calls)[2], const std::vector<MixedTask>& tasks) {
  using Second = SecondOf<Shape>;
  LargeRings<Shape> at;
  LargeTurns<Shape>::begin(static_cast<int>(threadIdx.x) / warpgroup_threads);
  int turn = 0;
  for (const MixedTask& one : tasks) {
    if (one.second) {
      LargeRings<Second> here{at.operands, at.rows};
      multiply_one_large(reinterpret_cast<Shared<Second>&>(shared), calls[1], one.task, here, turn);
      at = {here.operands, here.rows};
    } else {
      multiply_one_large(shared, calls[0], one.task, at, turn);
    }
  }
}

/// The loading warps, and the one that widens.
template <class Shape>
void bring(Shared<Shape>& shared, const ProductCall (&calls)[2], const std::vector<MixedTask>& tasks) {
  const int thread = static_cast<int>(threadIdx.x) - Shape::math_threads;
  if constexpr (Shape::widening_threads > 0) {
    if (thread < Shape::widening_threads) {
      PairWidener<Shape> widener(shared, thread);
      for (const MixedTask& one : tasks)
        one.second ? widener.copy(calls[1].weights.plan, one.task) : widener.widen(calls[0].weights.plan, one.task);
      return;
    }
  }
  const int warp = (thread - Shape::widening_threads) / warp_threads;
  const bool first = thread % warp_threads == 0;
  const auto for_each = [&](const auto& work) {
    for (const MixedTask& one : tasks) work(one, calls[one.second ? 1 : 0]);
  };
  if (warp == 0 && first) {
    WeightStream<Shape> stream(shared);
    for_each([&](const MixedTask& one, const ProductCall& call) {
      one.second ? stream.load_halves(call.weights, one.task) : stream.load(call.weights, one.task);
    });
  } else if (warp == 1) {
    ScaleLoader<Shape> scales(shared);
    Settled settled;
    for_each([&](const MixedTask& one, const ProductCall& call) {
      scales.load(call.tokens, call.weights.plan.cols, one.task, call.weights.plan.steps(), settled);
    });
  } else if (warp == 2 && first) {
    RowBoxes<Shape> boxes(shared);
    for_each([&](const MixedTask& one, const ProductCall& call) {
      for (int stage = 0; stage < call.weights.plan.steps(); ++stage)
        boxes.copy(call.tokens.tensor, one.task.flat, one.task.rows, stage);
    });
  }
}

template <class Shape>
void run_mixed(const ProductCall (&calls)[2], const std::vector<MixedTask>& tasks, unsigned seed, Products products) {
  std::memset(memory, 0xFF, sizeof memory);
  emulator::shared_memory() = memory;
  emulator::launch({1, Shape::threads, seed, products}, [&] {
    auto& shared = *reinterpret_cast<Shared<Shape>*>(memory);
    constexpr int scale_arrivals = arrivals_a_warp;
    if (threadIdx.x == 0) create_rings(shared, 1 + scale_arrivals);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= Shape::math_threads) return bring(shared, calls, tasks);
    if constexpr (Shape::tokens_first) {
      multiply_large(shared, calls, tasks);
    } else {
      multiply_small(shared, calls, tasks);
    }
  });
}

/// The tasks of both products, shuffled.
template <class Shape>
std::vector<MixedTask> mixed_tasks(const Inputs (&in)[2], Random& random) {
  std::vector<MixedTask> tasks;
  for (const bool second : {false, true}) {
    const Inputs& own = in[second ? 1 : 0];
    const int blocks = (own.tokens + Shape::most_tokens - 1) / Shape::most_tokens;
    for (int block = 0; block < blocks; ++block) {
      const int first = block * Shape::most_tokens;
      for (int tile = 0; tile < own.plan.tiles(); ++tile)
        tasks.push_back({second, {0, tile, first, std::min(own.tokens - first, Shape::most_tokens), first, blocks}});
    }
  }
  std::shuffle(tasks.begin(), tasks.end(), random);
  return tasks;
}

template <class Shape>
void check_mixed(const Inputs (&in)[2], unsigned seed, Products products) {
  Random random(seed);
  std::vector<std::uint16_t> wanted[2], found[2];
  std::vector<bf16> out[2];
  ProductCall calls[2];
  for (int i = 0; i < 2; ++i) {
    for (const float sum : all_sums(in[i])) wanted[i].push_back(to_bf16(sum).bits);
    out[i].assign(wanted[i].size(), bf16{0xABCD});
    calls[i].weights = in[i].matrix();
    calls[i].tokens = in[i].rows(Shape::box_rows);
    calls[i].results = {out[i].data(), size(in[i].plan.rows), in[i].wanted.rows, {RowMap::Kind::flat, 0, nullptr, nullptr}};
  }
  run_mixed<Shape>(calls, mixed_tasks<Shape>(in, random), seed, products);
  for (int i = 0; i < 2; ++i) {
    for (const bf16 value : out[i]) found[i].push_back(value.bits);
    EXPECT_TRUE(found[i] == wanted[i]) << (i == 0 ? "mxfp4" : "fp8 block");
  }
}

TEST(InTwoStages, TasksOfBothKindsTakeTurnsInTheSameRings) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  for (const bool step_exponents : {false, true}) {
    Random random(seed);
    const Inputs in[2] = {
        Inputs(random, {WeightKind::mxfp4, false, 448, 320, {70}, TokenScales::by_128, ScaleFormat::ue8m0, step_exponents}),
        Inputs(random, {WeightKind::fp8_block, false, 576, 192, {45}, TokenScales::by_128})};
    check_mixed<SmallBlocks<WeightKind::mxfp4, false>>(in, seed, Products::at_wait);
    check_mixed<SmallBlocks<WeightKind::mxfp4, false>>(in, seed + 1, Products::at_issue);
    check_mixed<LargeBlocks<WeightKind::mxfp4, false>>(in, seed + 2, Products::at_wait);
    check_mixed<LargeBlocks<WeightKind::mxfp4, false>>(in, seed + 3, Products::at_issue);
  }
}

}  // namespace
}  // namespace heddle::sm90
