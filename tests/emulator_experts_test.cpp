// The Hopper tile engine, its kernel run thread by thread on the host: rings, roles, row maps, tails, fragment layouts, epilogues.
// Sums are compared bit for bit with the same sums said again from the definition of the formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "emulator/device.hpp"
// The kernel, compiled for the host with the emulator's headers in the place of CUDA's and CuTe's.
#include "experts/sm90/product_kernel.cuh"

#include "emulator/emulator.hpp"
#include "experts/sm90/host_weights.hpp"
#include "experts_support.hpp"
#include "formats/rows.hpp"

namespace heddle::sm90 {

/// What the kernel calls its dynamic shared memory.
alignas(1024) std::byte memory[most_shared_bytes];

namespace {

using emulator::Products;
using heddle::testing::OwnedWeights;
using heddle::testing::pick;
using heddle::testing::Random;
using heddle::testing::random_weights;
using heddle::testing::size;

/// One product to try.
struct Case {
  WeightKind kind = WeightKind::mxfp4;
  bool paired = false;
  int rows = 64;  ///< of the weights; of gate alone where paired
  int cols = 128;
  std::vector<int> counts = {1};
  TokenScales scaling = TokenScales::by_128;
  ScaleFormat format = ScaleFormat::ue8m0;
  bool step_exponents = false;
};

/// A case's inputs in memory, as the loader and the ways leave them, and the sums they must give.
struct Inputs {
  Case wanted;
  WeightPlan plan;
  std::vector<std::vector<OwnedWeights>> stored;  ///< by expert: gate and up, or down
  std::vector<std::byte> chunks;
  std::vector<float> row_scales;
  std::size_t expert_stride = 0;
  std::vector<std::byte> values;
  std::vector<std::byte> scales;
  std::size_t value_stride = 0;
  std::size_t scale_stride = 0;
  int tokens = 0;

  Inputs(Random& random, const Case& c) : wanted(c) {
    plan = {c.kind, c.paired, c.step_exponents, c.paired ? 2 * c.rows : c.rows, c.cols};
    tokens = std::accumulate(c.counts.begin(), c.counts.end(), 0);
    for (std::size_t expert = 0; expert < c.counts.size(); ++expert) add_expert(random);
    draw_tokens(random);
  }

  int group() const { return wanted.scaling == TokenScales::by_32 ? 32 : 128; }
  int groups() const { return wanted.scaling == TokenScales::none ? 0 : (wanted.cols + group() - 1) / group(); }

  /// As boxes of so many rows, or one by one: 0.
  TokenRows rows(int box_rows) const {
    TokenRows rows{values.data(), value_stride, scales.data(), scale_stride, wanted.scaling, wanted.format, RowMap{}, 0, {}};
    if (box_rows == 0) return rows;
    rows.readable = tokens;
    const std::size_t row_bytes = size(wanted.cols) * (plan.shape().operand == Operand::e4m3 ? 1 : 2);
    const emulator::RowBoxes boxes{values.data(), value_stride, row_bytes, tokens, box_rows};
    static_assert(sizeof boxes <= sizeof rows.tensor);
    std::memcpy(rows.tensor.words, &boxes, sizeof boxes);
    return rows;
  }
  OrderedMatrix matrix() const { return {plan, chunks.data(), expert_stride, row_scales.empty() ? nullptr : row_scales.data()}; }

  float token(int row, int k) const {
    const std::byte* at = values.data() + size(row) * value_stride;
    if (plan.shape().operand == Operand::e4m3) return from_e4m3(static_cast<std::uint8_t>(at[k]));
    bf16 value;
    std::memcpy(&value, at + 2 * k, sizeof value);
    return to_float(value);
  }
  float token_scale(int row, int index) const {
    if (wanted.scaling == TokenScales::none) return 1.0f;
    const std::byte* at = scales.data() + size(row) * scale_stride;
    if (wanted.format == ScaleFormat::ue8m0) return from_ue8m0(static_cast<std::uint8_t>(at[index]));
    float scale;
    std::memcpy(&scale, at + 4 * size(index), sizeof scale);
    return scale;
  }

  /// The f32 sum of one token and one weight row, in the engine's order.
  float sum(const WeightMatrix& weights, const std::vector<float>& wide, int weight_row, int row) const {
    const int depth = plan.shape().operand == Operand::e4m3 ? 32 : 16;
    const int promotion = wanted.scaling == TokenScales::by_32 ? 32 : 128;
    const bool scaled = weights.kind == WeightKind::fp8_block || weights.kind == WeightKind::nvfp4;
    float total = 0.0f;
    for (int begin = 0; begin < wanted.cols; begin += promotion) {
      float partial = 0.0f;
      for (int from = begin; from < begin + promotion; from += depth) {
        double exact = partial;
        for (int k = from; k < std::min(from + depth, wanted.cols); ++k) {
          exact += static_cast<double>(wide[size(k)]) * static_cast<double>(token(row, k));
        }
        partial = static_cast<float>(exact);
      }
      const float scale = token_scale(row, begin / promotion);
      const float both = scaled ? scale * promotion_scale(weights, weight_row, begin / 128) : scale;
      total = std::fma(partial, both, total);
    }
    return total;
  }

 private:
  void add_expert(Random& random) {
    std::vector<OwnedWeights> one;
    for (int half = 0; half < (wanted.paired ? 2 : 1); ++half) {
      one.push_back(random_weights(random, wanted.kind, wanted.rows, wanted.cols));
      if (wanted.kind == WeightKind::nvfp4) one.back().view.tensor_scale = half == 0 ? 0.37f : 1.25f;
      if (wanted.step_exponents) spread(random, one.back());
    }
    const auto whole = [](const WeightMatrix& m) { return stored_part(m, {0, m.rows}, {0, m.cols}, "whole"); };
    const std::string names[2] = {"gate", "up"};
    const OrderedWeights ordered = order_weights(plan, {{whole(one.front().view), whole(one.back().view)}}, names);
    expert_stride = (ordered.chunks.size() + 255) / 256 * 256;
    chunks.insert(chunks.end(), ordered.chunks.begin(), ordered.chunks.end());
    chunks.resize((stored.size() + 1) * expert_stride);
    row_scales.insert(row_scales.end(), ordered.row_scales.begin(), ordered.row_scales.end());
    stored.push_back(std::move(one));
  }
  /// Scales of a row's steps far from each other, so that one base a row does not do.
  void spread(Random& random, OwnedWeights& weights) const {
    const std::size_t groups_a_row = size(wanted.cols + 31) / 32;
    for (std::size_t i = 0; i < weights.scales.size(); ++i) {
      const int step = static_cast<int>(i % groups_a_row) / 4;
      weights.scales[i] = static_cast<std::byte>(115 + 7 * (step % 3) + pick(random, 0, 3));
    }
  }
  void draw_tokens(Random& random) {
    const bool e4m3 = plan.shape().operand == Operand::e4m3;
    const std::size_t value_bytes = size(wanted.cols) * (e4m3 ? 1 : 2);
    value_stride = (value_bytes + 15) / 16 * 16 + 16;  // a gap, whose bytes are NaN in either format
    values.assign(size(tokens) * value_stride, std::byte{0xFF});
    std::normal_distribution<float> normal;
    for (int row = 0; row < tokens; ++row) {
      for (int k = 0; k < wanted.cols; ++k) {
        std::byte* at = values.data() + size(row) * value_stride;
        if (e4m3 || wanted.scaling != TokenScales::none) {
          const std::uint8_t code = to_e4m3(100.0f * normal(random));
          const bf16 wide = to_bf16(from_e4m3(code));
          if (e4m3) {
            at[k] = static_cast<std::byte>(code);
          } else {
            std::memcpy(at + 2 * k, &wide, 2);
          }
        } else {
          const bf16 value = to_bf16(normal(random));
          std::memcpy(at + 2 * k, &value, 2);
        }
      }
    }
    const std::size_t scale_bytes = size(groups()) * (wanted.format == ScaleFormat::f32 ? 4 : 1);
    scale_stride = (scale_bytes + 3) / 4 * 4 + 4;
    scales.assign(size(tokens) * scale_stride, std::byte{0xFF});
    for (int row = 0; row < tokens; ++row) {
      for (int group = 0; group < groups(); ++group) {
        std::byte* at = scales.data() + size(row) * scale_stride;
        const float scale = 0.001f * static_cast<float>(pick(random, 1, 100));
        if (wanted.format == ScaleFormat::ue8m0) {
          at[group] = static_cast<std::byte>(pick(random, 118, 124));
        } else {
          std::memcpy(at + 4 * group, &scale, 4);
        }
      }
    }
  }
};

/// All sums of an expert's matrices: [rows of the flat list, columns], gate then up where paired.
std::vector<float> all_sums(const Inputs& in) {
  const int width = in.plan.rows;
  std::vector<float> sums(size(in.tokens) * size(width));
  std::vector<float> wide(size(in.wanted.cols));
  int first = 0;
  for (std::size_t expert = 0; expert < in.stored.size(); ++expert) {
    const int count = in.wanted.counts[expert];
    for (std::size_t half = 0; half < in.stored[expert].size(); ++half) {
      const WeightMatrix& weights = in.stored[expert][half].view;
      for (int n = 0; n < in.wanted.rows; ++n) {
        widen_row(weights, n, 0, in.wanted.cols, wide.data());
        for (int row = first; row < first + count; ++row) {
          sums[size(row) * size(width) + half * size(in.wanted.rows) + size(n)] = in.sum(weights, wide, n, row);
        }
      }
    }
    first += count;
  }
  return sums;
}

template <class Shape>
void run(const ProductCall& call, int ctas, unsigned seed, Products products) {
  std::memset(memory, 0xFF, sizeof memory);
  emulator::shared_memory() = memory;
  emulator::launch({ctas, Shape::threads, seed, products}, [&] { product_kernel<Shape>(call); });
}

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

/// Small and large row blocks, rows one by one and in boxes, products as late and as early as they may be.
template <WeightKind kind>
void check_kind(const Case& wanted, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "kind " << static_cast<int>(kind) << ", seed " << seed << ", rows " << wanted.rows
                                    << ", cols " << wanted.cols << (wanted.paired ? ", paired" : ""));
  constexpr int most = slab_shape(kind).operand == Operand::e4m3 ? 128 : 96;
  Random random(seed);
  const Inputs in(random, wanted);
  check_stored<TileShape<kind, 4, 32, false>>(in, seed, Products::at_wait, false);
  check_stored<TileShape<kind, 4, 32, false>>(in, seed + 1, Products::at_issue, true);
  check_stored<TileShape<kind, 2, most, false>>(in, seed + 2, Products::at_wait, true);
  check_stored<TileShape<kind, 2, most, false>>(in, seed + 3, Products::at_issue, false);
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

// ---- Gate and up activated in the epilogue ----------------------------------------------------------------------------

struct Activated {
  Activation format = Activation::fp8;
  Quantisation quantisation;
  bool clamped = false;
  bool weighted = false;
};

template <class Shape>
void check_activated(const Inputs& in, const Activated& wanted, unsigned seed) {
  const int width = in.wanted.rows;
  const bool wide = in.plan.shape().operand == Operand::bf16;  // codes are widened too
  const std::size_t bytes = size(width) * (wide ? 2 : 1);
  const std::size_t groups = size((width + wanted.quantisation.group - 1) / wanted.quantisation.group);
  const std::size_t scale_bytes =
      wanted.format == Activation::bf16 ? 0 : groups * (wanted.quantisation.scale == ScaleFormat::f32 ? 4 : 1);
  const std::size_t value_stride = bytes + 16;
  const std::size_t scale_stride = scale_bytes + 4;
  Random random(seed);
  std::vector<float> weights(size(in.tokens));
  for (float& weight : weights) weight = 0.01f * static_cast<float>(pick(random, 1, 100));
  std::vector<std::byte> values(size(in.tokens + 1) * value_stride, std::byte{0xAB});
  std::vector<std::byte> scales(size(in.tokens + 1) * scale_stride, std::byte{0xAB});
  std::vector<std::byte> expected_values = values;
  std::vector<std::byte> expected_scales = scales;

  const DeviceClamp clamp = DeviceClamp::of(wanted.clamped ? std::optional(0.5f) : std::nullopt);
  const std::vector<float> sums = all_sums(in);
  std::vector<float> v(size(width));
  for (int row = 0; row < in.tokens; ++row) {
    for (std::size_t i = 0; i < size(width); ++i) {
      const float* gate = sums.data() + size(row) * 2 * size(width);
      std::uint32_t gates[1] = {ptx::to_bf16_pair(gate[i], 0.0f)};
      std::uint32_t ups[1] = {ptx::to_bf16_pair(gate[size(width) + i], 0.0f)};
      float pair[2];
      activate(gates, ups, clamp, wanted.weighted ? weights[size(row)] : 1.0f, pair);
      v[i] = pair[0];
    }
    std::byte* to = expected_values.data() + size(row) * value_stride;
    if (wanted.format == Activation::fp8) {
      std::vector<std::uint8_t> codes(size(width));
      quantise_fp8(v.data(), width, wanted.quantisation, codes.data(), expected_scales.data() + size(row) * scale_stride);
      for (std::size_t i = 0; i < size(width); ++i) {
        const bf16 value = to_bf16(from_e4m3(codes[i]));
        if (wide) {
          std::memcpy(to + 2 * i, &value, 2);
        } else {
          to[i] = static_cast<std::byte>(codes[i]);
        }
      }
    } else {
      for (std::size_t i = 0; i < size(width); ++i) {
        const bf16 value = to_bf16(v[i]);
        std::memcpy(to + 2 * i, &value, 2);
      }
    }
  }

  ProductCall call;
  call.weights = in.matrix();
  call.tokens = in.rows(pick(random, 0, 1) == 0 ? 0 : Shape::box_rows);
  call.counts = in.wanted.counts.data();
  call.experts = static_cast<int>(in.wanted.counts.size());
  call.activated = {wanted.format, wanted.quantisation, clamp,        wanted.weighted ? weights.data() : nullptr,
                    RowMap{},      values.data(),       value_stride, scales.data(),
                    scale_stride};
  run<Shape>(call, pick(random, 1, 2), seed, Products::at_wait);
  int wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] != expected_values[i] && ++wrong <= 5) {
      ADD_FAILURE() << "row " << i / value_stride << ", byte " << i % value_stride << ": " << static_cast<int>(values[i])
                    << ", expected " << static_cast<int>(expected_values[i]);
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(scales == expected_scales);
}

template <WeightKind kind>
void check_activations(const Case& wanted, const Activated& activated, unsigned seed) {
  SCOPED_TRACE(::testing::Message() << "kind " << static_cast<int>(kind) << ", seed " << seed);
  constexpr int most = slab_shape(kind).operand == Operand::e4m3 ? 128 : 96;
  Random random(seed);
  const Inputs in(random, wanted);
  check_activated<TileShape<kind, 4, 32, true>>(in, activated, seed);
  check_activated<TileShape<kind, 2, most, true>>(in, activated, seed + 1);
}

TEST(ActivatedSums, GroupsOf128) {
  const unsigned seed = std::random_device{}();
  const Case uneven{WeightKind::mxfp4, true, 320, 128, {5, 0, 34}, TokenScales::by_128};
  check_activations<WeightKind::mxfp4>(uneven, {Activation::fp8, {128, ScaleFormat::ue8m0}, true, true}, seed);
  check_activations<WeightKind::fp8_block>({WeightKind::fp8_block, true, 192, 192, {3, 9}, TokenScales::by_128},
                                           {Activation::fp8, {128, ScaleFormat::f32}, false, false}, seed + 10);
}

TEST(ActivatedSums, GroupsOf32) {
  check_activations<WeightKind::mxfp4>({WeightKind::mxfp4, true, 192, 128, {10}, TokenScales::by_32},
                                       {Activation::fp8, {32, ScaleFormat::ue8m0}, false, true}, std::random_device{}());
}

TEST(ActivatedSums, Bf16) {
  const unsigned seed = std::random_device{}();
  check_activations<WeightKind::bf16>({WeightKind::bf16, true, 192, 128, {6, 35}, TokenScales::none},
                                      {Activation::bf16, {}, true, true}, seed);
  check_activations<WeightKind::nvfp4>({WeightKind::nvfp4, true, 64, 128, {6}, TokenScales::by_128},
                                       {Activation::fp8, {}, false, true}, seed + 10);
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
  run<TileShape<WeightKind::mxfp4, 4, 32, false>>(call, 2, seed, Products::at_wait);
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
  check_stored<TileShape<WeightKind::bf16, 4, 32, false>>(in, 1, Products::at_wait, true);
}

}  // namespace
}  // namespace heddle::sm90
