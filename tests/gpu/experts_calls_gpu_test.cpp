// The experts of one GPU: how calls behave. Captured calls that follow the counts in memory, counts that do not fit, weights that
// change, slices, wrong arguments. What is computed is in experts_gpu_test.cpp.
#include <gtest/gtest.h>

#include <limits>

#include "exchange_support.hpp"
#include "gpu/experts_bed.hpp"

namespace heddle::testing {
namespace {

class ExpertCallsGpu : public ::testing::TestWithParam<WeightKind> {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  WeightKind kind() const { return GetParam(); }
  /// bf16 activations where that is possible.
  ExpertOptions options() const {
    ExpertOptions out;
    out.activation = takes_bf16(kind()) ? Activation::bf16 : Activation::fp8;
    return out;
  }
};

/// Calls captured once.
class Graph {
 public:
  template <class Calls>
  Graph(cudaStream_t stream, const Calls& calls) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    calls();
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable_, graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { check(cudaGraphLaunch(executable_, stream_), "graph"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

constexpr int hidden = 320, intermediate = 192, experts = 6, topk = 4, most_tokens = 90;

DeviceExpertsOptions room(bool fused = true) {
  DeviceExpertsOptions device;
  device.most_rows = most_tokens * topk;
  device.most_tokens = most_tokens;
  device.topk = topk;
  device.fused_activation = fused;
  return device;
}
/// A bed to hold others against: another row block, other CTAs, the other activation.
DeviceExpertsOptions other_room(bool fused) {
  DeviceExpertsOptions device = room(!fused);
  device.row_blocks = DeviceRowBlocks::small;
  device.ctas = 5;
  return device;
}
Batch draw_batch(Random& random, int tokens, const ExpertOptions& options) {
  return Batch(random, random_rows(random, tokens, hidden, options.activation, options.quantisation), topk, experts);
}
std::vector<bf16> first_rows(const std::vector<bf16>& all, int rows) {
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(rows) * hidden};
}
/// Numbers of tokens for replays: the least, all, any.
int tokens_of_round(Random& random, int round) {
  return round == 1 ? 1 : round == 2 ? most_tokens : pick(random, 1, round % 2 == 0 ? most_tokens : 8);
}

TEST_P(ExpertCallsGpu, ReplayedRoutedCallsFollowIdsAndTokensInMemory) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  const Layer layer(random, experts, hidden, intermediate, kind());
  for (const bool fused : {true, false}) {
    ExpertsBed bed(layer, options(), room(fused));
    ExpertsBed plain(layer, options(), other_room(fused));
    const Batch full = draw_batch(random, most_tokens, options());
    DeviceRows rows(full.rows);
    Buffer<int> ids(0, full.foreign_ids);
    Buffer<float> weights(0, full.weights);
    Buffer<int> here(0, std::vector<int>{most_tokens});
    DeviceResults slots(most_tokens * topk, hidden);
    DeviceResults sums(most_tokens, hidden);
    const auto call = [&](RoutedOutput mode, const DeviceResults& out) {
      bed.experts.routed(rows.view(), most_tokens, topk, ids.data(), weights.data(), mode, out.rows(), bed.stream, here.data());
    };
    const Graph graph(bed.stream, [&] {
      call(RoutedOutput::slots, slots);
      call(RoutedOutput::sum, sums);
    });
    for (int round = 0; round < longer(12); ++round) {
      const int tokens = tokens_of_round(random, round);
      SCOPED_TRACE(::testing::Message() << "replay " << round << " with " << tokens << " tokens, " << (fused ? "fused" : "chain")
                                        << ", seed " << seed);
      const Batch batch = draw_batch(random, tokens, options());
      rows.write(batch.rows.bytes);  // behind them the tokens and ids of earlier replays stay
      ids.write(batch.foreign_ids);
      weights.write(batch.weights);
      here.write({round == 0 ? 0 : tokens});
      slots.poison();
      sums.poison();
      graph.launch();
      bed.settle("replayed routed calls");
      const auto got = slots.read("slots", [&](int row) { return round > 0 && row < tokens * topk && batch.ids[size(row)] >= 0; });
      const auto summed = sums.read("sums", [&](int row) { return round > 0 && row < tokens; });
      if (round == 0) continue;  // no tokens: nothing written
      const std::vector<bf16> want = plain.routed(batch, RoutedOutput::slots);
      expect_same_bits(first_rows(got, tokens * topk), want, hidden, "slots");
      expect_same_bits(first_rows(summed, tokens), sums_of_slots(batch, want, hidden, options().weight_at), hidden, "sums");
      if (HasFailure()) return;
    }
  }
}

/// Contiguous, masked and dense calls in one graph, whose inputs may be replaced.
class LaidOutCalls {
 public:
  LaidOutCalls(ExpertsBed& bed, const OwnedRows& like)
      : bed_(bed),
        run_rows_(like, {}, size(most_run_rows) * like.view.value_stride),
        block_rows_(like, {}, size(experts * most_tokens) * like.view.value_stride),
        dense_rows_(like, {}, size(most_tokens) * like.view.value_stride),
        graph_(bed.stream, [this] { queue(); }) {}

  /// Pairs of the batch, and its tokens through expert 3; compared with what `plain` makes of them.
  void replay(Random& random, const Batch& batch, ExpertsBed& plain) {
    const Arrangement runs = Arrangement::runs(random, batch, experts, 8);
    const Arrangement blocks = Arrangement::blocks(random, batch, experts, most_tokens);
    run_rows_.write(gathered(batch.rows, runs.tokens(batch)));
    run_weights_.write(runs.weights(batch));
    begin_.write(runs.begin);
    block_rows_.write(gathered(batch.rows, blocks.tokens(batch)));
    block_weights_.write(blocks.weights(batch));
    counts_.write(runs.counts);
    dense_rows_.write(batch.rows.bytes);
    here_.write({batch.tokens()});
    for (DeviceResults* out : {&run_results_, &block_results_, &dense_results_}) out->poison();
    graph_.launch();
    bed_.settle("replayed contiguous, masked and dense calls");
    const std::vector<bf16> want = plain.routed(batch, RoutedOutput::slots);
    const auto is_row = [](const Arrangement& pairs) {
      return [&pairs](int row) { return row < pairs.rows() && pairs.choice_of[size(row)] >= 0; };
    };
    expect_same_bits(runs.by_choice(run_results_.read("contiguous", is_row(runs)), batch, hidden), want, hidden, "contiguous");
    expect_same_bits(blocks.by_choice(block_results_.read("masked", is_row(blocks)), batch, hidden), want, hidden, "masked");
    const auto dense = dense_results_.read("dense", [&](int row) { return row < batch.tokens(); });
    expect_same_bits(first_rows(dense, batch.tokens()), plain.dense(batch.rows, 3), hidden, "dense");
  }

 private:
  static constexpr int most_run_rows = most_tokens * topk + experts * 24 + 1;

  void queue() {
    bed_.experts.contiguous(run_rows_.view(), begin_.data(), counts_.data(), run_weights_.data(), run_results_.rows(), bed_.stream);
    bed_.experts.masked(block_rows_.view(), most_tokens, counts_.data(), block_weights_.data(), block_results_.rows(), bed_.stream);
    bed_.experts.dense(dense_rows_.view(), most_tokens, dense_results_.rows(), bed_.stream, 3, here_.data());
  }

  ExpertsBed& bed_;
  DeviceRows run_rows_, block_rows_, dense_rows_;
  Buffer<int> begin_{0, std::vector<int>(experts, 0)};
  Buffer<int> counts_{0, std::vector<int>(experts, 0)};
  Buffer<int> here_{0, std::vector<int>{0}};
  Buffer<float> run_weights_{0, size(most_run_rows)};
  Buffer<float> block_weights_{0, size(experts* most_tokens)};
  DeviceResults run_results_{most_run_rows, hidden};
  DeviceResults block_results_{experts * most_tokens, hidden};
  DeviceResults dense_results_{most_tokens, hidden};
  Graph graph_;  // last: it captures calls with all of these
};

TEST_P(ExpertCallsGpu, ReplayedCallsFollowCountsInMemory) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  const Layer layer(random, experts, hidden, intermediate, kind());
  for (const bool fused : {true, false}) {
    ExpertsBed bed(layer, options(), room(fused));
    ExpertsBed plain(layer, options(), other_room(fused));
    LaidOutCalls calls(bed, draw_batch(random, 1, options()).rows);
    for (int round = 0; round < longer(12); ++round) {
      const int tokens = tokens_of_round(random, round);
      SCOPED_TRACE(::testing::Message() << "replay " << round << " with " << tokens << " tokens, " << (fused ? "fused" : "chain")
                                        << ", seed " << seed);
      calls.replay(random, draw_batch(random, tokens, options()), plain);
      if (HasFailure()) return;
    }
  }
}

/// Byte for byte.
void expect_read_back(const DeviceExperts& device, int expert, const ExpertWeights& stored, cudaStream_t stream) {
  const OwnedExpert back = device.read_back(expert, stream);
  const WeightMatrix* const got[] = {&back.view.gate, &back.view.up, &back.view.down};
  const WeightMatrix* const want[] = {&stored.gate, &stored.up, &stored.down};
  constexpr const char* names[] = {"gate", "up", "down"};
  for (int i = 0; i < 3; ++i) {
    SCOPED_TRACE(::testing::Message() << "expert " << expert << ", " << names[i]);
    EXPECT_EQ(got[i]->kind, want[i]->kind);
    EXPECT_EQ(got[i]->rows, want[i]->rows);
    EXPECT_EQ(got[i]->cols, want[i]->cols);
    EXPECT_EQ(got[i]->tensor_scale, want[i]->tensor_scale);
    EXPECT_TRUE(std::equal(got[i]->values.begin(), got[i]->values.end(), want[i]->values.begin(), want[i]->values.end()));
    EXPECT_TRUE(std::equal(got[i]->scales.begin(), got[i]->scales.end(), want[i]->scales.begin(), want[i]->scales.end()));
  }
}

TEST_P(ExpertCallsGpu, CapturedCallsUseUpdatedWeights) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  const Layer before(random, experts, hidden, intermediate, kind());
  const Layer after(random, 1, hidden, intermediate, kind());
  const Batch batch = draw_batch(random, 50, options());
  ExpertsBed bed(before, options(), room());
  const DeviceRows rows(batch.rows);
  const Buffer<int> ids(0, batch.foreign_ids);
  const Buffer<float> weights(0, batch.weights);
  DeviceResults out(batch.choices(), hidden);
  const Graph graph(bed.stream, [&] {
    bed.experts.routed(rows.view(), 50, topk, ids.data(), weights.data(), RoutedOutput::slots, out.rows(), bed.stream);
  });
  const auto replay = [&] {
    out.poison();
    graph.launch();
    bed.settle("a replayed call");
    return out.read("slots", [&](int row) { return batch.ids[size(row)] >= 0; });
  };
  const std::vector<bf16> old = replay();
  bed.experts.update(2, after.views[0], bed.stream);
  std::vector<ExpertWeights> views = before.views;
  views[2] = after.views[0];
  ExpertsBed fresh(views, hidden, intermediate, options(), room());
  const std::vector<bf16> want = fresh.routed(batch, RoutedOutput::slots);
  expect_same_bits(replay(), want, hidden, "after an update, against experts loaded so");
  for (int expert = 0; expert < experts; ++expert) expect_read_back(bed.experts, expert, views[size(expert)], bed.stream);
  EXPECT_EQ(bed.experts.report().experts, experts + 1);

  ExpertWeights wrong = after.views[0];
  std::swap(wrong.gate, wrong.down);
  EXPECT_THROW(bed.experts.update(2, wrong, bed.stream), InputError);
  EXPECT_THROW(bed.experts.update(experts, after.views[0], bed.stream), InputError);
  expect_same_bits(replay(), want, hidden, "after updates that were refused");
  bed.experts.update(2, before.views[2], bed.stream);
  expect_same_bits(replay(), old, hidden, "with the first weights again");
}

TEST_P(ExpertCallsGpu, SlicesAddUpToTheWhole) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  constexpr int whole = 640, tokens = 100;
  const Layer layer(random, experts, hidden, whole, kind());
  const Batch batch = draw_batch(random, tokens, options());
  DeviceExpertsOptions device = room();
  device.most_tokens = tokens;
  device.most_rows = tokens * topk;
  std::vector<float> sums(size(batch.choices() * hidden));
  int first = 0;
  for (const int count : {128, 384, 0}) {  // 0: the rest
    device.slice_first = first;
    device.slice_count = count;
    ExpertsBed bed(layer, options(), device);
    ASSERT_EQ(bed.experts.intermediate(), count == 0 ? whole - first : count);
    const std::vector<bf16> part = bed.routed(batch, RoutedOutput::slots);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += to_float(part[i]);
    first += count;
  }
  std::vector<bf16> host(sums.size());
  layer.experts(options()).routed(batch.rows.view, tokens, topk, batch.ids.data(), batch.weights.data(), RoutedOutput::slots,
                                  {host.data()});
  double error = 0, norm = 0, compared = 0;
  for (int choice = 0; choice < batch.choices(); ++choice) {
    if (batch.ids[size(choice)] < 0) continue;
    compared += whole;
    for (std::size_t i = size(choice * hidden); i < size((choice + 1) * hidden); ++i) {
      error += std::pow(sums[i] - to_float(host[i]), 2);
      norm += std::pow(to_float(host[i]), 2);
    }
  }
  ASSERT_GE(compared, 0x1p17);
  EXPECT_LE(std::sqrt(error / norm), options().activation == Activation::fp8 ? 1.5e-2 : 4e-3) << "seed " << seed;
}

TEST_P(ExpertCallsGpu, ANonNumberIsItsOwnTokensAlone) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  ExpertOptions fp8;
  fp8.clamp = 7.0f;
  const Layer layer(random, experts, hidden, intermediate, kind());
  Batch batch(random, random_rows(random, 40, hidden, Activation::bf16, {}), topk, experts);
  for (const ExpertOptions& chosen : {fp8, options()}) {
    ExpertsBed bed(layer, chosen, room());
    ExpertsBed chain(layer, chosen, other_room(true));
    const std::vector<bf16> before = bed.routed(batch, RoutedOutput::slots);
    const std::vector<std::byte> bytes = batch.rows.bytes;
    const bf16 infinite = to_bf16(std::numeric_limits<float>::infinity());
    std::memcpy(batch.rows.bytes.data() + 17 * batch.rows.view.value_stride + 2 * 130, &infinite, sizeof infinite);
    for (ExpertsBed* one : {&bed, &chain}) {
      std::vector<bf16> after = one->routed(batch, RoutedOutput::slots);
      for (std::size_t i = size(17 * topk * hidden); i < size(18 * topk * hidden); ++i) {
        if (batch.ids[i / size(hidden)] < 0) continue;
        ASSERT_TRUE(std::isnan(to_float(after[i]))) << "choice " << i / size(hidden) << ", column " << i % size(hidden) << ": "
                                                    << to_float(after[i]) << " of a token with an infinity, seed " << seed;
        after[i] = before[i];
      }
      expect_same_bits(after, before, hidden, "tokens beside one with an infinity");
    }
    std::copy(bytes.begin(), bytes.end(), batch.rows.bytes.begin());
  }
}

std::string kind_name(const ::testing::TestParamInfo<WeightKind>& kind) { return name_of(kind.param); }
INSTANTIATE_TEST_SUITE_P(All, ExpertCallsGpu, ::testing::ValuesIn(all_kinds), kind_name);

}  // namespace
}  // namespace heddle::testing
