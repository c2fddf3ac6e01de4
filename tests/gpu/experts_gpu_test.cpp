// The experts of one GPU: what they compute. Against the float64 reference and the host engine within the bounds of
// docs/numerics.md; runners, row blocks, activations, grids and numbers of CTAs against each other bit for bit. How calls behave
// (graphs, counts that do not fit, updates) is in experts_calls_gpu_test.cpp, the product alone in product_gpu_test.cpp.
#include <gtest/gtest.h>

#include <cstdio>

#include "exchange_support.hpp"
#include "experts/sm90/launch.hpp"
#include "experts_expected.hpp"
#include "gpu/experts_bed.hpp"

namespace heddle::testing {
namespace {

class ExpertsGpu : public ::testing::TestWithParam<WeightKind> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  WeightKind kind() const { return GetParam(); }
  ExpertOptions draw_options(Random& random) const {
    ExpertOptions options = random_options(random);
    if (!takes_bf16(kind())) options.activation = Activation::fp8;
    return options;
  }
  /// Rows as the activations are or, now and then, bf16 that are quantised on arrival.
  OwnedRows draw_rows(Random& random, int count, int hidden, const ExpertOptions& options, int spread = 3) const {
    const Activation arrived = pick(random, 0, 2) == 0 ? Activation::bf16 : options.activation;
    return random_rows(random, count, hidden, arrived, options.quantisation, spread);
  }
};

std::string describe(const ExpertOptions& options, const DeviceExpertsOptions& device, const Batch& batch, const Layer& layer) {
  std::ostringstream text;
  text << layer.views.size() << " experts, hidden " << layer.hidden << ", intermediate " << layer.intermediate << ", "
       << batch.tokens() << " tokens with " << batch.topk << " choices as "
       << (batch.rows.view.format == Activation::bf16 ? "bf16" : "fp8") << "; activations "
       << (options.activation == Activation::bf16 ? "bf16" : "fp8") << " in groups of " << options.quantisation.group
       << " with scales " << (options.quantisation.scale == ScaleFormat::f32 ? "f32" : "ue8m0") << ", weights at "
       << (options.weight_at == WeightAt::combine ? "combine" : "activation") << (options.clamp ? ", clamped" : "") << "; "
       << (device.row_blocks == DeviceRowBlocks::automatic ? "automatic"
                                                           : sm90::name(sm90::BlockChoice{device.row_blocks, true}.choose(0)))
       << " row blocks, "
       << (device.fused_activation                             ? "fused activation"
           : options.activation_grid == ActivationGrid::padded ? "activation on a padded grid"
                                                               : "activation on a persistent grid")
       << ", " << device.ctas << " CTAs (0: all)";
  return text.str();
}

/// ‖a - b‖ / ‖b‖ over many cases, each with the weight of its size (tokens * k * D); and its worst row.
class Pooled {
 public:
  template <class Value>
  void add(const std::vector<bf16>& got, const std::vector<Value>& want, int hidden, double weight, const std::string& what) {
    double error = 0;
    double norm = 0;
    for (std::size_t begin = 0; begin < got.size(); begin += testing::size(hidden)) {
      if (is_poison(want[begin])) continue;
      double row_error = 0;
      double row_norm = 0;
      for (std::size_t i = begin; i < begin + testing::size(hidden); ++i) {
        const double wanted = value_of(want[i]);
        row_error += std::pow(to_float(got[i]) - wanted, 2);
        row_norm += wanted * wanted;
      }
      error += row_error;
      norm += row_norm;
      const double off = std::sqrt(row_error / std::max(row_norm, 1e-30));
      if (row_norm > 0 && !(off <= worst_)) {
        worst_ = off;
        std::ostringstream text;
        text << "row " << begin / testing::size(hidden) << " is off by " << off << " of its norm: " << what;
        where_ = text.str();
      }
    }
    if (norm == 0) {
      EXPECT_EQ(error, 0) << what << ": all results are 0";
      return;
    }
    error_ += error / norm * weight;
    size_ += weight;
  }
  double size() const { return size_; }
  double value() const { return std::sqrt(error_ / size_); }
  const std::string& where() const { return where_; }

 private:
  static bool is_poison(double) { return false; }
  static bool is_poison(bf16 value) { return value.bits == poison_bits; }
  static double value_of(double value) { return value; }
  static double value_of(bf16 value) { return to_float(value); }
  double error_ = 0;
  double size_ = 0;
  double worst_ = 0;
  std::string where_ = "no rows";
};

void expect_within(const Pooled& pooled, Activation activation, const std::string& what) {
  const double bound = activation == Activation::fp8 ? 1.5e-2 : 4e-3;
  ASSERT_GE(pooled.size(), 0x1p17) << what << ": too few values to judge";
  std::printf("  %s: off by %.2e, may be %.1e\n", what.c_str(), pooled.value(), bound);
  EXPECT_LE(pooled.value(), bound) << what << "; the worst row: " << pooled.where();
}

std::vector<bf16> host_slots(const Layer& layer, const ExpertOptions& options, const Batch& batch) {
  std::vector<bf16> out(size(batch.choices()) * size(layer.hidden), bf16{poison_bits});
  layer.experts(options).routed(batch.rows.view, batch.tokens(), batch.topk, batch.ids.data(), batch.weights.data(),
                                RoutedOutput::slots, {out.data()});
  return out;
}

/// The sum of every token in float64.
std::vector<double> expected_sums(const Layer& layer, const ExpertOptions& options, const Batch& batch) {
  const Expected expected(layer, options);
  const bool early = options.weight_at == WeightAt::activation;
  std::vector<double> sums(size(batch.tokens()) * size(layer.hidden));
  for (int choice = 0; choice < batch.choices(); ++choice) {
    if (batch.ids[size(choice)] < 0) continue;
    const int token = choice / batch.topk;
    const float weight = batch.weights[size(choice)];
    const auto row = widened_row(batch.rows, options, token, layer.hidden);
    const std::vector<double> pair = expected.pair(batch.ids[size(choice)], row, early ? weight : 1.0f);
    for (std::size_t i = 0; i < pair.size(); ++i) {
      sums[size(token) * pair.size() + i] += pair[i] * (early ? 1.0 : static_cast<double>(weight));
    }
  }
  return sums;
}

double pairs_times_width(const Batch& batch, int intermediate) {
  const auto pairs = std::count_if(batch.ids.begin(), batch.ids.end(), [](int id) { return id >= 0; });
  return static_cast<double>(pairs) * intermediate;
}

struct Shape {
  int experts, hidden, intermediate, tokens, topk;
};

TEST_P(ExpertsGpu, AgreesWithFloat64AndTheHost) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  constexpr Shape shapes[] = {{3, 128, 64, 60, 3},   {5, 640, 640, 30, 4},  {2, 320, 1088, 30, 3}, {1, 2880, 2880, 9, 1},
                              {2, 640, 2304, 20, 2}, {2, 2304, 640, 40, 2}, {9, 192, 448, 100, 6}};
  for (const Activation activation : {Activation::fp8, Activation::bf16}) {
    if (activation == Activation::bf16 && !takes_bf16(kind())) continue;
    Pooled reference;
    Pooled host;
    for (const Shape& shape : shapes) {
      ExpertOptions options = draw_options(random);
      options.activation = activation;
      const Layer layer(random, shape.experts, shape.hidden, shape.intermediate, kind());
      const Batch batch(random, draw_rows(random, shape.tokens, shape.hidden, options, 0), shape.topk, shape.experts);
      DeviceExpertsOptions device = room_for(batch);
      device.fused_activation = pick(random, 0, 2) != 0;
      const std::string what = describe(options, device, batch, layer) + ", seed " + std::to_string(seed);
      SCOPED_TRACE(what);
      ExpertsBed bed(layer, options, device);
      const double size = pairs_times_width(batch, shape.intermediate);
      reference.add(bed.routed(batch, RoutedOutput::sum), expected_sums(layer, options, batch), shape.hidden, size, what);
      host.add(bed.routed(batch, RoutedOutput::slots), host_slots(layer, options, batch), shape.hidden, size, what);
      if (HasFailure()) return;
    }
    const std::string name = name_of(kind()) + " weights, " + (activation == Activation::fp8 ? "fp8" : "bf16");
    expect_within(reference, activation, name + " against float64");
    expect_within(host, activation, name + " against the host engine");
  }
}

/// Routings that are not spread: no pair at all, one, all in one expert, and one with few.
std::vector<int> odd_ids(Random& random, int which, int tokens, int topk, int experts) {
  std::vector<int> ids(size(tokens * topk), -1);
  if (which == 1) ids[size(pick(random, 0, tokens * topk - 1))] = experts - 1;
  if (which == 2) {
    const int chosen = pick(random, 0, experts - 1);
    for (int token = 0; token < tokens; ++token) ids[size(token * topk + pick(random, 0, topk - 1))] = chosen;
  }
  if (which == 3) {
    for (int token = 0; token < tokens; token += 9) ids[size(token * topk)] = pick(random, 0, experts - 1);
  }
  return ids;
}

TEST_P(ExpertsGpu, OneToManyExpertsHoweverTheRowsAreSpread) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  constexpr int hidden = 128, intermediate = 192, tokens = 130, topk = 4;
  Pooled host;
  for (const int experts : {1, 2, 31, 32, 33, 100, 256, 1024}) {
    if (experts > 256 && kind() != WeightKind::mxfp4) continue;  // enough of them; the lists know no kinds
    const Layer layer(random, experts, hidden, intermediate, kind());
    ExpertOptions options = draw_options(random);
    options.activation = Activation::fp8;
    DeviceExpertsOptions device;
    device.most_rows = tokens * topk;
    device.most_tokens = tokens;
    device.topk = topk;
    device.fused_activation = pick(random, 0, 1) == 0;
    ExpertsBed bed(layer, options, device);
    for (int which = 0; which < 5; ++which) {
      std::vector<int> ids = which == 4 ? std::vector<int>() : odd_ids(random, which, tokens, topk, experts);
      const Batch batch(random, draw_rows(random, tokens, hidden, options, 0), topk, experts, std::move(ids));
      const std::string what = describe(options, device, batch, layer) + ", spread " + std::to_string(which) +
                               " of odd_ids, seed " + std::to_string(seed);
      SCOPED_TRACE(what);
      const std::vector<bf16> slots = bed.routed(batch, RoutedOutput::slots);
      const double size = pairs_times_width(batch, intermediate);
      if (size > 0) host.add(slots, host_slots(layer, options, batch), hidden, size, what);
      expect_same_bits(bed.routed(batch, RoutedOutput::sum), sums_of_slots(batch, slots, hidden, options.weight_at), hidden,
                       "sums");
      expect_same_bits(bed.arranged(batch, Arrangement::runs(random, batch, experts, 8)), slots, hidden, "contiguous");
      expect_same_bits(bed.arranged(batch, Arrangement::blocks(random, batch, experts, tokens)), slots, hidden, "masked");
      if (HasFailure()) return;
    }
  }
  expect_within(host, Activation::fp8, name_of(kind()) + " weights of 1 to 256 experts against the host engine");
}

/// Ways to compute the same pairs.
struct Variant {
  DeviceRowBlocks blocks;
  bool fused;
  ActivationGrid grid;
};
constexpr Variant variants[] = {
    {DeviceRowBlocks::small, true, ActivationGrid::persistent},  {DeviceRowBlocks::large, true, ActivationGrid::persistent},
    {DeviceRowBlocks::small, false, ActivationGrid::persistent}, {DeviceRowBlocks::large, false, ActivationGrid::padded},
    {DeviceRowBlocks::small, false, ActivationGrid::padded},     {DeviceRowBlocks::large, false, ActivationGrid::persistent},
    {DeviceRowBlocks::medium, true, ActivationGrid::persistent}, {DeviceRowBlocks::medium, false, ActivationGrid::persistent}};

TEST_P(ExpertsGpu, EveryRunnerAndConfigurationGivesTheSameBits) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  constexpr int sizes[] = {64, 128, 192, 320, 640, 1088};
  for (int round = 0; round < longer(5); ++round) {
    ExpertOptions options = draw_options(random);
    const int experts = pick(random, 1, 12);
    const int hidden = round == 0 ? 2304 : sizes[pick(random, 0, 5)];
    const Layer layer(random, experts, hidden, sizes[pick(random, 0, 5)], kind());
    const Batch batch(random, draw_rows(random, pick(random, 1, 150), hidden, options), pick(random, 1, 6), experts);
    std::vector<bf16> slots;
    for (const Variant& variant : variants) {
      DeviceExpertsOptions device = room_for(batch, pick(random, 0, 40));
      device.row_blocks = variant.blocks;
      device.fused_activation = variant.fused;
      device.ctas = pick(random, 0, 2) == 0 ? 0 : pick(random, 1, 60);
      options.activation_grid = variant.grid;
      SCOPED_TRACE(describe(options, device, batch, layer) + ", seed " + std::to_string(seed));
      ExpertsBed bed(layer, options, device);
      const std::vector<bf16> got = bed.routed(batch, RoutedOutput::slots);
      if (slots.empty()) slots = got;
      expect_same_bits(got, slots, hidden, "slots, against those of the first configuration");
      expect_same_bits(bed.routed(batch, RoutedOutput::slots), slots, hidden, "slots once more");
      expect_same_bits(bed.routed(batch, RoutedOutput::sum), sums_of_slots(batch, slots, hidden, options.weight_at), hidden,
                       "sums");
      const int alignment = pick(random, 0, 1) == 0 ? 1 : 128;
      expect_same_bits(bed.arranged(batch, Arrangement::runs(random, batch, experts, alignment)), slots, hidden, "contiguous");
      const int block_rows = batch.tokens() + pick(random, 0, 5);
      expect_same_bits(bed.arranged(batch, Arrangement::blocks(random, batch, experts, block_rows)), slots, hidden, "masked");
      if (HasFailure()) return;
    }
  }
}

TEST_P(ExpertsGpu, ExpectedRowsChangeNoBit) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  const ExpertOptions options = draw_options(random);
  const Layer layer(random, 4, 320, 192, kind());
  const Batch batch(random, draw_rows(random, 90, 320, options), 3, 4);
  ExpertsBed bed(layer, options, room_for(batch));
  const std::vector<bf16> slots = bed.routed(batch, RoutedOutput::slots, 1);
  expect_same_bits(bed.routed(batch, RoutedOutput::slots, 1000), slots, 320, "routed");
  for (const int expected : {1, 1000}) {
    SCOPED_TRACE(::testing::Message() << "expected_rows " << expected << ", seed " << seed);
    expect_same_bits(bed.arranged(batch, Arrangement::runs(random, batch, 4, 16), expected), slots, 320, "contiguous");
    expect_same_bits(bed.arranged(batch, Arrangement::blocks(random, batch, 4, 90), expected), slots, 320, "masked");
  }
}

TEST_P(ExpertsGpu, RowsQuantisedOnArrivalAreAsIfTheyHadArrivedSo) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  for (const int group : {128, 32}) {
    for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
      ExpertOptions options;
      options.quantisation = {group, scale};
      const int hidden = pick(random, 0, 1) == 0 ? 320 : 2880;
      SCOPED_TRACE(::testing::Message() << "groups of " << group << (scale == ScaleFormat::f32 ? ", f32" : ", ue8m0") << ", hidden "
                                        << hidden << ", seed " << seed);
      const Layer layer(random, 2, hidden, 128, kind());
      const Batch wide(random, random_rows(random, 45, hidden, Activation::bf16, {}), 2, 2);
      RowFormat wire;
      wire.wire = Wire::fp8;
      wire.hidden = hidden;
      wire.quantisation = options.quantisation;
      OwnedRows quantised;
      quantised.count = wide.rows.count;
      quantised.bytes.resize(size(quantised.count) * wire.row_bytes());
      for (int row = 0; row < quantised.count; ++row) {
        const auto values = widened_row(wide.rows, options, row, hidden);
        quantise_row(values.data(), wire, quantised.bytes.data() + size(row) * wire.row_bytes());
      }
      quantised.view = {Activation::fp8, quantised.bytes.data(), wire.row_bytes(), quantised.bytes.data() + wire.scale_offset(),
                        wire.row_bytes()};
      Batch narrow(random, std::move(quantised), 2, 2, wide.ids);
      narrow.weights = wide.weights;
      for (const bool fused : {true, false}) {
        DeviceExpertsOptions device = room_for(wide);
        device.fused_activation = fused;
        ExpertsBed bed(layer, options, device);
        const std::vector<bf16> slots = bed.routed(wide, RoutedOutput::slots);
        expect_same_bits(bed.arranged(wide, Arrangement::runs(random, wide, 2, 4)), slots, hidden, "bf16 rows, contiguous");
        expect_same_bits(bed.routed(narrow, RoutedOutput::slots), slots, hidden, "rows that arrive as fp8");
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(ExpertsGpu, DenseIsARoutedCallWithWeightOne) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  for (const bool fused : {true, false}) {
    const ExpertOptions options = draw_options(random);
    const Layer layer(random, 3, 320, 192, kind());
    for (const int count : {1, 40, 150}) {
      SCOPED_TRACE(::testing::Message() << count << " rows, " << (fused ? "fused" : "chain") << ", seed " << seed);
      Batch batch(random, draw_rows(random, count, 320, options), 1, 3, std::vector<int>(size(count), 2));
      batch.weights.assign(size(count), 1.0f);
      DeviceExpertsOptions device = room_for(batch);
      device.fused_activation = fused;
      ExpertsBed bed(layer, options, device);
      expect_same_bits(bed.dense(batch.rows, 2), bed.routed(batch, RoutedOutput::sum), 320, "dense against routed");
    }
  }
}

std::string kind_name(const ::testing::TestParamInfo<WeightKind>& kind) { return name_of(kind.param); }
INSTANTIATE_TEST_SUITE_P(All, ExpertsGpu, ::testing::ValuesIn(all_kinds), kind_name);

}  // namespace
}  // namespace heddle::testing
