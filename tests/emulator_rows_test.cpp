// Kernels that move rows around the products, run thread by thread on the host: rows into an operand's format against the rules of
// the formats, pairs listed by expert, and sums by token. Whatever may not be written is looked at.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>

#include "emulator/device.hpp"

// Arrays that a kernel's threads share: one of each, as CTAs run one after another here.
#undef __shared__
#define __shared__ static
#include "experts/sm90/routed.cuh"
#include "experts/sm90/rows.cuh"

#include "experts_support.hpp"
#include "formats/rows.hpp"

namespace heddle::sm90 {
namespace {

using heddle::testing::pick;
using heddle::testing::Random;
using heddle::testing::size;

constexpr std::byte untouched{0xAB};
constexpr std::uint16_t poison = 0xABCD;

/// HEDDLE_SEED, or a fresh one.
std::uint64_t announced_seed() {
  const char* given = std::getenv("HEDDLE_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::printf("HEDDLE_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

/// Rows of bf16 in memory, with what else comes in: infinities, NaN, zeros of both signs, the smallest numbers.
struct Inputs {
  int count, columns;
  std::size_t stride;
  std::vector<std::byte> bytes;

  Inputs(Random& random, int rows, int width) : count(rows), columns(width), stride(2 * size(width) + 16) {
    bytes.assign(size(count) * stride, std::byte{0xFF});
    std::normal_distribution<float> normal;
    constexpr std::uint16_t odd[] = {0x7F80, 0xFF80, 0x7FC0, 0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F};
    for (int row = 0; row < count; ++row) {
      const float scale = std::exp2(static_cast<float>(pick(random, -30, 30)));
      for (int column = 0; column < columns; ++column) {
        bf16 value = to_bf16(scale * normal(random));
        if (pick(random, 0, 700) == 0) value.bits = odd[pick(random, 0, 7)];
        std::memcpy(bytes.data() + size(row) * stride + 2 * size(column), &value, sizeof value);
      }
    }
  }
  std::vector<float> row(int index) const {
    std::vector<float> out;
    for (int column = 0; column < columns; ++column) {
      bf16 value;
      std::memcpy(&value, bytes.data() + size(index) * stride + 2 * size(column), sizeof value);
      out.push_back(to_float(value));
    }
    return out;
  }
};

/// Rows of an operand as they must be, and as a kernel leaves them.
struct Operands {
  std::size_t stride, scale_stride;
  std::vector<std::byte> values, scales;

  Operands(int rows, int columns, int groups, bool wide, ScaleFormat format)
      : stride(size(columns) * (wide ? 2 : 1) + 16),
        scale_stride((size(groups) * (format == ScaleFormat::f32 ? 4 : 1) + 3) / 4 * 4 + 4),
        values(size(rows) * stride, untouched),
        scales(size(rows) * scale_stride, untouched) {}

  /// By the rules of the formats.
  void set(int place, const std::vector<float>& row, const Quantisation& quantisation, bool wide) {
    std::vector<std::uint8_t> codes(row.size());
    quantise_fp8(row.data(), static_cast<int>(row.size()), quantisation, codes.data(), scales.data() + size(place) * scale_stride);
    set_codes(place, codes, wide);
  }
  void set_codes(int place, const std::vector<std::uint8_t>& codes, bool wide) {
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const bf16 value = to_bf16(from_e4m3(codes[i]));
      std::byte* to = values.data() + size(place) * stride;
      if (wide) {
        std::memcpy(to + 2 * i, &value, sizeof value);
      } else {
        to[i] = static_cast<std::byte>(codes[i]);
      }
    }
  }
};

void expect_equal(const Operands& got, const Operands& want) {
  const auto differ = [](const std::vector<std::byte>& a, const std::vector<std::byte>& b, std::size_t stride, const char* what) {
    const auto [one, other] = std::mismatch(a.begin(), a.end(), b.begin());
    if (one == a.end()) return;
    const auto at = static_cast<std::size_t>(one - a.begin());
    ADD_FAILURE() << what << ": row " << at / stride << ", byte " << at % stride << " is " << static_cast<int>(*one)
                  << " instead of " << static_cast<int>(*other);
  };
  differ(got.values, want.values, want.stride, "values");
  differ(got.scales, want.scales, want.scale_stride, "scales");
}

template <RowChange change>
void launch(const RowsCall& call, int ctas, Random& random) {
  const auto run = [&]<ScaleFormat format>() {
    emulator::launch({ctas, rows::threads_a_cta, static_cast<unsigned>(random())},
                     [&] { rows::change_rows<change, format>(call); });
  };
  if (call.quantisation.scale == ScaleFormat::f32) {
    run.template operator()<ScaleFormat::f32>();
  } else {
    run.template operator()<ScaleFormat::ue8m0>();
  }
}

constexpr Quantisation quantisations[] = {
    {128, ScaleFormat::ue8m0}, {128, ScaleFormat::f32}, {32, ScaleFormat::ue8m0}, {32, ScaleFormat::f32}};

void connect(RowsCall& call, const Operands& to) {
  call.to = const_cast<std::byte*>(to.values.data());
  call.to_stride = to.stride;
  call.to_scales = const_cast<std::byte*>(to.scales.data());
  call.to_scale_stride = to.scale_stride;
}

/// Rows of experts in runs with gaps, quantised to their flat places; counts and weights listed with them; what is beyond the
/// limits left alone.
template <RowChange change>
void check_quantised(Random& random, const Quantisation& quantisation, int columns) {
  constexpr bool wide = change == RowChange::quantise_widely;
  SCOPED_TRACE(::testing::Message() << columns << " columns, groups of " << quantisation.group << (wide ? ", widely" : ""));
  const Inputs in(random, 30, columns);
  const std::vector<int> begin{0, 10, 12, 25};
  const std::vector<int> counts{3, 2, 11, 5};
  const std::vector<int> limited{3, 2, 7, 0};  // seven a expert, and twelve in all
  const int groups = (columns + quantisation.group - 1) / quantisation.group;
  std::vector<float> weights(30);
  for (float& weight : weights) weight = std::uniform_real_distribution<float>()(random);
  Operands got(14, columns, groups, wide, quantisation.scale);
  Operands want = got;
  std::vector<float> flat_weights(14, -1), wanted_weights(14, -1);
  std::vector<int> flat_counts(4, -1);
  unsigned long long refused = 0;

  RowsCall call;
  call.counts = counts.data();
  call.experts = 4;
  call.limits = {7, 12, &refused};
  call.map.kind = RowMap::Kind::listed;
  call.map.begin = begin.data();
  call.values = in.bytes.data();
  call.value_stride = in.stride;
  call.columns = columns;
  call.quantisation = quantisation;
  connect(call, got);
  call.weights = weights.data();
  call.flat_weights = flat_weights.data();
  call.flat_counts = flat_counts.data();
  launch<change>(call, pick(random, 1, 4), random);

  int flat = 0;
  for (std::size_t expert = 0; expert < 4; ++expert) {
    for (int row = 0; row < limited[expert]; ++row, ++flat) {
      want.set(flat, in.row(begin[expert] + row), quantisation, wide);
      wanted_weights[size(flat)] = weights[size(begin[expert] + row)];
    }
  }
  expect_equal(got, want);
  EXPECT_EQ(flat_weights, wanted_weights);
  EXPECT_EQ(flat_counts, limited);
  const RefusedCount found = RefusedCount::unpack(refused);
  EXPECT_TRUE((found.expert == 2 && found.count == 11) || (found.expert == 3 && found.count == 5)) << found.expert;
}

TEST(EmulatedRows, QuantisedToFlatPlaces) {
  Random random(announced_seed());
  for (const Quantisation& quantisation : quantisations) {
    for (const int columns : {64, 320, 1088}) {
      check_quantised<RowChange::quantise>(random, quantisation, columns);
      check_quantised<RowChange::quantise_widely>(random, quantisation, columns);
      if (HasFailure()) return;
    }
  }
}

TEST(EmulatedRows, WidenedWithTheirScales) {
  Random random(announced_seed());
  for (const Quantisation& quantisation : quantisations) {
    const int columns = 64 * pick(random, 1, 20);
    SCOPED_TRACE(::testing::Message() << columns << " columns, groups of " << quantisation.group);
    const int groups = (columns + quantisation.group - 1) / quantisation.group;
    Operands stored(6, columns, groups, false, quantisation.scale);
    Operands want(6, columns, groups, true, quantisation.scale);
    Operands got = want;
    for (int row = 0; row < 6; ++row) {
      std::vector<std::uint8_t> codes(size(columns));
      for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(pick(random, 0, 255));
      stored.set_codes(row, codes, false);
      want.set_codes(row, codes, true);
    }
    const std::size_t scale_bytes = size(groups) * (quantisation.scale == ScaleFormat::f32 ? 4 : 1);
    for (std::size_t i = 0; i < stored.scales.size(); ++i) stored.scales[i] = static_cast<std::byte>(pick(random, 0, 255));
    for (std::size_t row = 0; row < 6; ++row) {
      std::memcpy(want.scales.data() + row * want.scale_stride, stored.scales.data() + row * stored.scale_stride, scale_bytes);
    }
    const std::vector<int> counts{0, 6};
    RowsCall call;
    call.counts = counts.data();
    call.experts = 2;
    call.values = stored.values.data();
    call.value_stride = stored.stride;
    call.scales = stored.scales.data();
    call.scale_stride = stored.scale_stride;
    call.columns = columns;
    call.quantisation = quantisation;
    connect(call, got);
    launch<RowChange::widen>(call, 2, random);
    expect_equal(got, want);

    std::fill(got.scales.begin(), got.scales.end(), untouched);
    std::fill(want.scales.begin(), want.scales.end(), untouched);
    call.to_scales = nullptr;  // the activation step has put them where they belong
    launch<RowChange::widen>(call, 1, random);
    expect_equal(got, want);
  }
}

TEST(EmulatedRows, WeightsAndCountsAlone) {
  Random random(announced_seed());
  const std::vector<int> counts{2, 0, 3};
  std::vector<float> weights(30), flat(6, -1);
  std::iota(weights.begin(), weights.end(), 0.0f);
  std::vector<int> flat_counts(3, -1);
  RowsCall call;
  call.counts = counts.data();
  call.experts = 3;
  call.map = {RowMap::Kind::blocks, 10, nullptr, nullptr};
  call.weights = weights.data();
  call.flat_weights = flat.data();
  call.flat_counts = flat_counts.data();
  launch<RowChange::none>(call, 2, random);
  EXPECT_EQ(flat, (std::vector<float>{0, 1, 20, 21, 22, -1}));
  EXPECT_EQ(flat_counts, counts);
  call.weights = nullptr;
  launch<RowChange::none>(call, 2, random);
  EXPECT_EQ(flat, (std::vector<float>{1, 1, 1, 1, 1, -1}));
}

// ---- Routed calls -------------------------------------------------------------------------------------------------------

struct Routed {
  int tokens, topk, experts;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

  Routed(Random& random, int count, int choices, int local) : tokens(count), topk(choices), experts(local) {
    for (int pair = 0; pair < tokens * topk; ++pair) {
      ids.push_back(pick(random, 0, 2) == 0 ? pick(random, -2, experts + 2) : pick(random, 0, experts - 1));
      weights.push_back(std::uniform_real_distribution<float>(0.1f, 1.0f)(random));
    }
  }
  bool own(int pair) const { return ids[size(pair)] >= 0 && ids[size(pair)] < experts; }
};

TEST(EmulatedRows, TokensWithoutAnOwnExpertAreLeftOut) {
  Random random(announced_seed());
  const Routed routed(random, 20, 3, 2);
  const Inputs in(random, 20, 192);
  Operands got(20, 192, 2, false, ScaleFormat::f32);
  Operands want = got;
  const int here = 17;
  RowsCall call;
  call.experts = 2;
  call.ids = routed.ids.data();
  call.tokens = {20, &here};
  call.topk = 3;
  call.values = in.bytes.data();
  call.value_stride = in.stride;
  call.columns = 192;
  call.quantisation = {128, ScaleFormat::f32};
  connect(call, got);
  launch<RowChange::quantise>(call, 2, random);
  for (int token = 0; token < here; ++token) {
    if (routed.own(3 * token) || routed.own(3 * token + 1) || routed.own(3 * token + 2)) {
      want.set(token, in.row(token), call.quantisation, false);
    }
  }
  expect_equal(got, want);
}

/// The lists of a routed call, as the kernel leaves them.
struct Lists {
  std::vector<int> counts, token_of, pair_of, place_of;
  std::vector<float> weight_of;

  Lists(Random& random, const Routed& routed, int most_rows, int warps, const int* here)
      : counts(size(routed.experts), -9),
        token_of(size(most_rows) + 1, -9),
        pair_of(token_of),
        place_of(routed.ids.size(), -9),
        weight_of(token_of.size(), -9) {
    ListCall call;
    call.ids = routed.ids.data();
    call.weights = routed.weights.data();
    call.tokens = {routed.tokens, here};
    call.topk = routed.topk;
    call.experts = routed.experts;
    call.most_rows = most_rows;
    call.counts = counts.data();
    call.token_of = token_of.data();
    call.pair_of = pair_of.data();
    call.weight_of = weight_of.data();
    call.place_of = place_of.data();
    emulator::launch({routed.experts, warps * warp_threads, static_cast<unsigned>(random())},
                     [&] { heddle::sm90::routed::list_pairs(call); });
  }
};

TEST(EmulatedRows, PairsAreListedByExpertInTheirOrder) {
  Random random(announced_seed());
  for (int round = 0; round < 12; ++round) {
    const Routed routed(random, pick(random, 1, 150), pick(random, 1, 6), pick(random, 1, 9));
    const int here = pick(random, 0, routed.tokens + 3);
    const int pairs = std::min(here, routed.tokens) * routed.topk;
    const int most_rows = round % 3 == 0 ? std::max(1, pairs / 4) : routed.tokens * routed.topk;
    const int warps = pick(random, 1, 32);
    SCOPED_TRACE(::testing::Message() << "round " << round << ": " << routed.tokens << " tokens, " << here << " here, "
                                      << routed.topk << " choices, " << routed.experts << " experts, room for " << most_rows << ", "
                                      << warps << " warps");
    const Lists lists(random, routed, most_rows, warps, &here);
    std::vector<int> counts(size(routed.experts)), token_of(size(most_rows) + 1, -9), pair_of(token_of);
    std::vector<int> place_of(routed.ids.size(), -9);
    std::vector<float> weight_of(token_of.size(), -9);
    int place = 0;
    for (int expert = 0; expert < routed.experts; ++expert) {
      for (int pair = 0; pair < pairs; ++pair) {
        if (routed.ids[size(pair)] != expert) continue;
        ++counts[size(expert)];
        place_of[size(pair)] = place;
        if (place < most_rows) {
          token_of[size(place)] = pair / routed.topk;
          pair_of[size(place)] = pair;
          weight_of[size(place)] = routed.weights[size(pair)];
        }
        ++place;
      }
    }
    EXPECT_EQ(lists.counts, counts);
    EXPECT_EQ(lists.token_of, token_of);
    EXPECT_EQ(lists.pair_of, pair_of);
    EXPECT_EQ(lists.place_of, place_of);
    EXPECT_EQ(lists.weight_of, weight_of);
    if (HasFailure()) return;
  }
}

TEST(EmulatedRows, PairsAreSummedInChoiceOrder) {
  Random random(announced_seed());
  for (int round = 0; round < 8; ++round) {
    const Routed routed(random, pick(random, 1, 12), round == 0 ? 40 : pick(random, 1, 9), pick(random, 1, 5));
    const int columns = 64 * pick(random, 1, 9);
    const int most_rows = round % 3 == 1 ? routed.tokens : routed.tokens * routed.topk;
    const bool weighted = round % 2 == 0;
    SCOPED_TRACE(::testing::Message() << "round " << round << ": " << routed.tokens << " tokens, " << routed.topk << " choices, "
                                      << columns << " columns, room for " << most_rows);
    const int here = routed.tokens;
    const Lists lists(random, routed, most_rows, 3, &here);
    std::vector<bf16> results(size(most_rows * columns));
    std::normal_distribution<float> normal;
    for (bf16& value : results) value = to_bf16(normal(random));
    const std::size_t stride = size(columns) + 8;
    std::vector<bf16> out(size(routed.tokens + 1) * stride, bf16{poison});
    SumCall call;
    call.ids = routed.ids.data();
    call.weights = weighted ? routed.weights.data() : nullptr;
    call.tokens = {routed.tokens, nullptr};
    call.topk = routed.topk;
    call.experts = routed.experts;
    call.most_rows = most_rows;
    call.place_of = lists.place_of.data();
    call.results = results.data();
    call.columns = columns;
    call.out = out.data();
    call.stride = stride;
    emulator::launch({pick(random, 1, 3), routed::sum_threads, static_cast<unsigned>(random())},
                     [&] { heddle::sm90::routed::sum_pairs(call); });
    for (int token = 0; token <= routed.tokens; ++token) {
      for (std::size_t column = 0; column < stride; ++column) {
        float sum = 0.0f;
        for (int pair = token * routed.topk; token < routed.tokens && pair < (token + 1) * routed.topk; ++pair) {
          if (!routed.own(pair) || lists.place_of[size(pair)] >= most_rows || column >= size(columns)) continue;
          const float value = to_float(results[size(lists.place_of[size(pair)] * columns) + column]);
          sum = std::fma(weighted ? routed.weights[size(pair)] : 1.0f, value, sum);
        }
        const bool there = token < routed.tokens && column < size(columns);
        ASSERT_EQ(out[size(token) * stride + column].bits, there ? to_bf16(sum).bits : poison)
            << "token " << token << ", column " << column;
      }
    }
  }
}

}  // namespace
}  // namespace heddle::sm90
