// The bare product of the tile engine, from "does it start" upwards. Run these in order after any change to the engine; the first
// one that fails says which part is wrong:
//   Fits        registers and shared memory of every kernel, without a launch
//   Starts      a launch without tasks: barriers, setmaxnreg, the end of every role
//   Identity    tokens are unit vectors, weights tell their own row and column: fragment order, swizzle, transposed store
//   Ones        sums of ones: how many columns are added, tails of K
//   Scales      powers of two: whose scale is applied to what
//   WholeNumbers  random whole numbers over all counts of rows, row blocks, maps, experts and CTAs
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "gpu/product_bed.hpp"

namespace heddle::sm90 {
namespace {

constexpr std::uint16_t poison = 0x7F7F;

bool is_e4m3(WeightKind kind) { return slab_shape(kind).operand == Operand::e4m3; }
TokenScales usual_scales(WeightKind kind) { return is_e4m3(kind) ? TokenScales::by_128 : TokenScales::none; }

class Product : public ::testing::TestWithParam<WeightKind> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  WeightKind kind() const { return GetParam(); }
};

/// What the launch of a kernel gives to all threads is what setmaxnreg asks for, or more.
void expect_fit(const ProductKernel& kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel.function), "loading a product");
  const int warpgroups = kernel.threads / warpgroup_threads - 1;
  const int wanted = (warpgroups == 4 ? 104 * 4 + 64 : 224 * 2 + 56) * warpgroup_threads;
  SCOPED_TRACE(::testing::Message() << kernel.threads << " threads of " << attributes.numRegs << " registers, "
                                    << attributes.localSizeBytes << " bytes of spills, " << kernel.shared_bytes_for(most_experts)
                                    << " bytes of shared memory");
  EXPECT_GE(attributes.numRegs * kernel.threads, wanted)
      << "setmaxnreg asks for more registers than the launch gets: math warpgroups would wait for ever";
  EXPECT_LE(attributes.numRegs * kernel.threads, 65536);
  EXPECT_LE(kernel.shared_bytes_for(most_experts) + attributes.sharedSizeBytes, size(most_shared_bytes));
}

TEST_P(Product, AFits) {
  for (const RowBlocks blocks : every_row_blocks) {
    for (const bool activates : {false, true}) {
      for (const KernelCalls calls : {KernelCalls::plain, KernelCalls::any}) {
        SCOPED_TRACE(::testing::Message() << name(blocks) << " row blocks" << (activates ? ", activating" : "")
                                          << (calls == KernelCalls::plain ? ", usual calls" : ""));
        expect_fit(find_kernel(kind(), blocks, activates, calls));
      }
    }
  }
  prepare_products(kind());
}

std::vector<std::vector<OwnedWeights>> one_expert(OwnedWeights matrix) {
  std::vector<std::vector<OwnedWeights>> experts(1);
  experts[0].push_back(std::move(matrix));
  return experts;
}

float one(int, int) { return 1.0f; }

TEST_P(Product, BStarts) {
  ProductBed bed(kind(), one_expert(matrix_of(kind(), 64, 128, one)));
  const Tokens tokens{8, 128, one, usual_scales(kind()), ScaleFormat::ue8m0, {}};
  for (const RowBlocks blocks : every_row_blocks) {
    for (const int ctas : {1, 16}) {
      const std::vector<bf16> out = bed.run(tokens, {0}, blocks, ctas);
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](bf16 value) { return value.bits == poison; })) << "no rows, but results";
    }
  }
}

/// Digit `place` of a number, base 4, as 1 to 4: all kinds have these values, and 0 means that nothing was there.
float digit(int number, int place) { return static_cast<float>((number >> (2 * place) & 3) + 1); }

constexpr int digits = 5;  ///< of a row or a column: up to 1,024 of them

/// What the results of ten products say about where a value came from: five with the digits of the row, five with the column's.
struct Source {
  int row = 0;
  int column = 0;
  bool known = true;  ///< every digit was one of 1 to 4

  void read(float value, int place) {
    const int found = static_cast<int>(value) - 1;
    known = known && value >= 1.0f && value <= 4.0f && value == static_cast<float>(found + 1);
    (place < digits ? row : column) |= (found & 3) << (2 * (place % digits));
  }
};

/// Token t is unit vector t of K = 128: result [t, n] is weight (n, t).
void expect_identity(WeightKind kind, RowBlocks blocks, int rows, int count, int first) {
  SCOPED_TRACE(::testing::Message() << name(blocks) << " row blocks, " << rows << " weight rows, unit vectors " << first << " to "
                                    << first + count - 1);
  const Tokens tokens{
      count, 128, [&](int t, int k) { return k == first + t ? 1.0f : 0.0f; }, usual_scales(kind), ScaleFormat::ue8m0, {}};
  std::vector<Source> sources(size(count * rows));
  std::vector<float> values(size(count * rows));
  for (int place = 0; place < 2 * digits; ++place) {
    const auto value = [&](int n, int k) { return digit(place < digits ? n : k, place % digits); };
    ProductBed bed(kind, one_expert(matrix_of(kind, rows, 128, value)));
    const std::vector<bf16> out = bed.run(tokens, {count}, blocks, 1);
    for (int t = 0; t < count; ++t) {
      for (int n = 0; n < rows; ++n) {
        const bf16 got = out[size(t) * bed.result_stride() + size(n)];
        values[size(t * rows + n)] = to_float(got);
        sources[size(t * rows + n)].read(got.bits == poison ? 0.0f : to_float(got), place);
      }
    }
  }
  Wrongs wrongs;
  int wrong_rows = 0, wrong_columns = 0, unknown = 0;
  for (int t = 0; t < count; ++t) {
    for (int n = 0; n < rows; ++n) {
      const Source& source = sources[size(t * rows + n)];
      if (source.known && source.row == n && source.column == first + t) continue;
      unknown += source.known ? 0 : 1;
      wrong_rows += source.known && source.row != n ? 1 : 0;
      wrong_columns += source.known && source.column != first + t ? 1 : 0;
      std::ostringstream text;
      text << "token " << t << " (k = " << first + t << "), weight row " << n << ": ";
      if (source.known) {
        text << "holds weight (" << source.row << ", k = " << source.column << ")";
      } else {
        text << "no single weight; the last product gave " << values[size(t * rows + n)];
      }
      wrongs.add(t, n, text.str());
    }
  }
  if (!wrongs.any()) return;
  ADD_FAILURE()
      << wrongs.explain(count * rows, count, rows) << "  " << wrong_rows
      << " hold another weight row: the fragment of weights by row (weight_order.hpp, slab_row), or the transposed store\n  "
      << wrong_columns
      << " hold another column: the fragment of weights by K (register_column), the swizzle, or the step of the descriptor\n  "
      << unknown << " hold no single weight: rows that were not there (row loader, barriers), not written, or wrong scales";
}

TEST_P(Product, CIdentityOfEightTokens) {
  for (const RowBlocks blocks : every_row_blocks) {
    for (const int first : {0, 8, 56, 120}) {
      expect_identity(kind(), blocks, 64, 8, first);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Product, DIdentityOfAllTokens) {
  for (const RowBlocks blocks : every_row_blocks) {
    for (const int rows : {64, 128, 256, 320}) {
      expect_identity(kind(), blocks, rows, 128, 0);
      if (HasFailure()) return;
    }
  }
}

/// Compares everything with sums said on the host.
void expect_sums(const ProductBed& bed, const Tokens& tokens, const std::vector<int>& counts, const std::vector<bf16>& out,
                 const std::function<int(int flat)>& token_of, const std::function<int(int flat)>& place_of) {
  const int width = bed.width();
  const std::size_t stride = bed.result_stride();
  std::vector<char> written(out.size() / stride);
  Wrongs wrongs;
  int flat = 0;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    for (int row = 0; row < counts[expert]; ++row, ++flat) {
      const auto place = size(place_of(flat));
      written[place] = 1;
      for (int n = 0; n < width; ++n) {
        const float want = to_float(to_bf16(bed.expected(tokens, static_cast<int>(expert), token_of(flat), n)));
        const bf16 got = out[place * stride + size(n)];
        if (to_float(got) == want) continue;
        std::ostringstream text;
        text << "expert " << expert << ", row " << row << " (token " << token_of(flat) << "), weight row " << n << ": ";
        if (got.bits == poison) {
          text << "not written";
        } else {
          text << to_float(got) << " instead of " << want << ", " << to_float(got) / want << " times as much";
        }
        wrongs.add(row, n, text.str());
      }
    }
  }
  if (wrongs.any()) ADD_FAILURE() << wrongs.explain(flat * width, flat, width);
  int stray = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i].bits == poison || (written[i / stride] != 0 && i % stride < size(width))) continue;
    if (++stray <= 5) ADD_FAILURE() << "place " << i / stride << ", column " << i % stride << " was written, but is nobody's";
  }
  EXPECT_EQ(stray, 0);
}

int same(int flat) { return flat; }

TEST_P(Product, EOnesTellHowManyColumnsAreAdded) {
  for (const RowBlocks blocks : every_row_blocks) {
    for (const int cols : {128, 64, 192, 256, 320}) {
      SCOPED_TRACE(::testing::Message() << name(blocks) << " row blocks, K = " << cols);
      ProductBed bed(kind(), one_expert(matrix_of(kind(), 64, cols, one)));
      const Tokens tokens{9, cols, one, usual_scales(kind()), ScaleFormat::ue8m0, {}};
      bed.in_boxes = cols != 192;
      expect_sums(bed, tokens, {9}, bed.run(tokens, {9}, blocks, 1), same, same);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Product, FScalesOfTokens) {
  const std::vector<TokenScales> all = is_e4m3(kind()) ? std::vector{TokenScales::by_128, TokenScales::by_32}
                                                       : std::vector{TokenScales::none, TokenScales::by_128, TokenScales::by_32};
  for (const RowBlocks blocks : every_row_blocks) {
    for (const TokenScales scaling : all) {
      for (const ScaleFormat format : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
        SCOPED_TRACE(::testing::Message() << name(blocks) << " row blocks, scales by "
                                          << (scaling == TokenScales::by_32 ? "32" : "128 (or none)") << " as "
                                          << (format == ScaleFormat::f32 ? "f32" : "ue8m0"));
        ProductBed bed(kind(), one_expert(matrix_of(kind(), 64, 704, one)));
        // One column of a group is 1: the result is the sum of the groups' scales, each a power of two of its own.
        const int group = scaling == TokenScales::by_32 ? 32 : 128;
        const Tokens tokens{37,      704,    [&](int, int k) { return k % group == 5 ? 1.0f : 0.0f; },
                            scaling, format, [](int t, int g) { return std::exp2(static_cast<float>((t + 3 * g) % 7 - 3)); }};
        expect_sums(bed, tokens, {37}, bed.run(tokens, {37}, blocks, 1), same, same);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Product, GScalesOfWeights) {
  for (const RowBlocks blocks : every_row_blocks) {
    SCOPED_TRACE(::testing::Message() << name(blocks) << " row blocks");
    const int group = kind() == WeightKind::nvfp4 ? 16 : 32;
    const ValueAt scale = [&](int n, int k) {
      return kind() == WeightKind::fp8_block ? std::exp2(static_cast<float>(n / 128 - k / 128))
                                             : std::exp2(static_cast<float>((n + k / group) % 5 - 2));
    };
    ProductBed bed(kind(), one_expert(matrix_of(kind(), 320, 320, one, scale, 0.125f)));
    // Token t looks at columns t, t + 16, ... of which there is one in every group of 16.
    const Tokens tokens{20, 320, [](int t, int k) { return k % 20 == t ? 1.0f : 0.0f; }, usual_scales(kind()), ScaleFormat::ue8m0,
                        {}};
    expect_sums(bed, tokens, {20}, bed.run(tokens, {20}, blocks, 2), same, same);
    if (HasFailure()) return;
  }
}

/// Weights and tokens of whole numbers that every kind has.
OwnedWeights whole_numbers(Random& random, WeightKind kind, int rows, int cols) {
  constexpr float values[] = {-4, -3, -2, -1, 0, 1, 2, 3};
  return matrix_of(kind, rows, cols, [&](int, int) { return values[random() % 8]; });
}
Tokens whole_tokens(Random& random, WeightKind kind, int count, int cols) {
  auto drawn = std::make_shared<std::vector<float>>(size(count * cols));
  for (float& value : *drawn) value = static_cast<float>(random() % 5) - 2.0f;
  return {count, cols, [drawn, cols](int t, int k) { return (*drawn)[size(t * cols + k)]; }, usual_scales(kind), ScaleFormat::ue8m0,
          {}};
}

TEST_P(Product, HWholeNumbersOfEveryCountOfRows) {
  const std::uint64_t seed = std::random_device{}();
  Random random(seed);
  ProductBed bed(kind(), one_expert(whole_numbers(random, kind(), 320, 320)));
  for (const int count : {1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 95, 96, 97, 127, 128, 129, 200}) {
    const Tokens tokens = whole_tokens(random, kind(), count, 320);
    for (const RowBlocks blocks : every_row_blocks) {
      for (const int ctas : {1, 3}) {
        SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << count << " rows, " << name(blocks) << " row blocks, "
                                          << ctas << " CTAs, rows " << (ctas == 1 ? "in boxes" : "one by one"));
        bed.in_boxes = ctas == 1;
        expect_sums(bed, tokens, {count}, bed.run(tokens, {count}, blocks, ctas), same, same);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Product, IWholeNumbersOfManyExperts) {
  const std::uint64_t seed = std::random_device{}();
  Random random(seed);
  for (const int experts : {3, 40}) {
    const int rows = experts == 3 ? 704 : 192;
    const int cols = experts == 3 ? 640 : 128;
    std::vector<std::vector<OwnedWeights>> all;
    std::vector<int> counts;
    for (int expert = 0; expert < experts; ++expert) {
      all.emplace_back();
      all.back().push_back(whole_numbers(random, kind(), rows, cols));
      counts.push_back(random() % 3 == 0 ? 0 : static_cast<int>(random() % 70));
    }
    counts[1] = 0;
    ProductBed bed(kind(), std::move(all));
    const int total = std::accumulate(counts.begin(), counts.end(), 0);
    const Tokens tokens = whole_tokens(random, kind(), std::max(total, 1), cols);
    for (const RowBlocks blocks : every_row_blocks) {
      for (const int ctas : {5, 132}) {
        SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << experts << " experts, " << total << " rows, "
                                          << name(blocks) << " row blocks, " << ctas << " CTAs");
        bed.in_boxes = ctas == 132;
        expect_sums(bed, tokens, counts, bed.run(tokens, counts, blocks, ctas), same, same);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Product, JRowMaps) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  std::vector<std::vector<OwnedWeights>> all(3);
  for (auto& expert : all) expert.push_back(whole_numbers(random, kind(), 64, 192));
  ProductBed bed(kind(), std::move(all));
  const std::vector<int> counts = {5, 0, 41};
  constexpr int block_rows = 64;
  std::vector<int> list(46);  // by flat place: which token; and of another list where its result goes
  for (int& token : list) token = static_cast<int>(random() % 20);
  std::vector<int> places(46);
  std::iota(places.begin(), places.end(), 3);
  std::shuffle(places.begin(), places.end(), random);
  const std::vector<int> begins = {100, 0, 7};
  const Buffer<int> device_list(0, list), device_places(0, places), device_begins(0, begins);
  const Tokens few = whole_tokens(random, kind(), 20, 192);
  const Tokens many = whole_tokens(random, kind(), 3 * block_rows, 192);
  const auto in_blocks = [&](int flat) { return flat < 5 ? flat : 2 * block_rows + flat - 5; };
  const auto listed = [&](int flat) { return flat < 5 ? 100 + flat : 7 + flat - 5; };
  for (const RowBlocks blocks : every_row_blocks) {
    const RowMap by_list{RowMap::Kind::flat, 0, nullptr, device_list.data()};
    const RowMap by_places{RowMap::Kind::flat, 0, nullptr, device_places.data()};
    expect_sums(
        bed, few, counts, bed.run(few, counts, blocks, 2, by_list, by_places, 60), [&](int flat) { return list[size(flat)]; },
        [&](int flat) { return places[size(flat)]; });
    const RowMap by_blocks{RowMap::Kind::blocks, block_rows, nullptr, nullptr};
    const RowMap by_begins{RowMap::Kind::listed, 0, device_begins.data(), nullptr};
    expect_sums(bed, many, counts, bed.run(many, counts, blocks, 2, by_blocks, by_begins, 110), in_blocks, listed);
    expect_sums(bed, many, counts, bed.run(many, counts, blocks, 2, by_begins, by_blocks, 3 * block_rows), listed, in_blocks);
    if (HasFailure()) return;
  }
}

TEST_P(Product, KGateAndUpInPairs) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  Random random(seed);
  for (const int intermediate : {64, 192, 320}) {
    std::vector<std::vector<OwnedWeights>> all(2);
    for (auto& expert : all) {
      for (int half = 0; half < 2; ++half) expert.push_back(whole_numbers(random, kind(), intermediate, 192));
    }
    ProductBed bed(kind(), std::move(all));
    const Tokens tokens = whole_tokens(random, kind(), 60, 192);
    for (const RowBlocks blocks : every_row_blocks) {
      expect_sums(bed, tokens, {19, 41}, bed.run(tokens, {19, 41}, blocks, 4), same, same);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Product, LCountsBeyondTheLimitsAreCut) {
  Random random(5);
  std::vector<std::vector<OwnedWeights>> all(4);
  for (auto& expert : all) expert.push_back(whole_numbers(random, kind(), 64, 128));
  ProductBed bed(kind(), std::move(all));
  const Tokens tokens = whole_tokens(random, kind(), 64, 128);
  const Buffer<int> counts(0, std::vector<int>{-7, 30, 2'000'000'000, 9});
  const Buffer<unsigned long long> refused(0, std::vector<unsigned long long>{0});
  const Buffer<bf16> out(0, 64 * bed.result_stride());
  ProductCall call;
  call.weights = bed.matrix();
  call.tokens = bed.upload(tokens);
  call.counts = counts.data();
  call.experts = 4;
  call.limits = {50, 40, refused.data()};
  call.results = {out.data(), bed.result_stride(), 64, {}};
  check(cudaDeviceSynchronize(), "inputs");
  launch_product(call, RowBlocks::small, false, 3, bed.stream());
  wait_for(bed.stream(), "a product whose counts do not fit");
  const auto found = RefusedCount::unpack(refused.read()[0]);
  EXPECT_TRUE(found.expert == 0 || found.expert == 2 || found.expert == 3) << found.expert;
  expect_sums(bed, tokens, {0, 30, 10, 0}, out.read(), same, same);
}

INSTANTIATE_TEST_SUITE_P(All, Product, ::testing::ValuesIn(heddle::testing::all_kinds),
                         [](const auto& kind) { return name_of(kind.param); });

}  // namespace
}  // namespace heddle::sm90
