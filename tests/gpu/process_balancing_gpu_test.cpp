// A layer that follows the load over two processes with GPUs of their own: experts cross from one to the other, and all switch
// behind the same call. On one GPU the processes take turns.
#include "balancing_support.hpp"
#include "gpu/layer_bed.hpp"
#include "gpu/process_run.hpp"
#include "heddle/device_balancing.hpp"

namespace heddle::layer_test {
namespace {

constexpr int processes = 2;

/// One process's GPU with its ranks.
class BalancedProcess {
 public:
  BalancedProcess(const Case& c, const ReplicaMap& first, const BalancingOptions& balancing, Group& group,
                  const DeviceGroupOptions& mine)
      : case_(c),
        synthetic_(c.layer),
        source_(source_of(synthetic_, c)),
        common_(LayerWeights::common(physical_source(source_, first), first.placement())),
        memory_(memory_of_both()),
        workspace_(group, mine, memory_.heap_bytes(c.ranks()), describe(common_, c.options)) {
    check(cudaSetDevice(workspace_.device(0)), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    std::vector<LayerWeights> weights;
    for (int local = 0; local < mine.ranks; ++local) {
      places_.emplace_back(workspace_.device(0), static_cast<std::size_t>(c.options.cap), hidden(), topk());
      weights.push_back(LayerWeights::load(source_, c.placement, workspace_.first_rank(0) + local));
    }
    plain_.emplace(workspace_, 0, memory_, weights, c.options);
    layer_.emplace(workspace_, memory_, source_, first, c.options, balancing, DeviceBalancingOptions{2, {}, {}});
  }
  ~BalancedProcess() { cudaStreamDestroy(stream_); }
  BalancedProcess(const BalancedProcess&) = delete;

  DeviceBalancedLayer& layer() { return *layer_; }

  void load(const Tokens& tokens) {
    for (std::size_t local = 0; local < places_.size(); ++local)
      places_[local].load(input_of(case_, tokens, rank_of(local)), hidden(), topk());
    check(cudaStreamSynchronize(nullptr), "copies of inputs");
  }
  /// Of the own ranks, one behind the other, by a layer without copies.
  std::vector<bf16> without_copies() {
    plain_->forward(inputs(), step_of(case_), outputs(), stream_);
    check(cudaStreamSynchronize(stream_), "a call of a layer");
    plain_->throw_if_failed();
    return fetch();
  }
  void call() {
    layer_->forward(0, inputs(), step_of(case_), outputs(), stream_);
    layer_->follow(std::vector{stream_});
  }
  std::vector<bf16> waited_for() {
    wait_for(stream_, "calls of a balanced layer", std::chrono::seconds(90));
    layer_->throw_if_failed();
    return fetch();
  }

 private:
  std::size_t hidden() const { return static_cast<std::size_t>(case_.layer.shape.hidden); }
  std::size_t topk() const { return static_cast<std::size_t>(case_.layer.shape.topk); }
  int rank_of(std::size_t local) const { return workspace_.first_rank(0) + static_cast<int>(local); }
  ExchangeMemory memory_of_both() const {
    ExchangeMemory memory = layer_memory(common_, case_.options);
    memory.include(layer_memory(LayerWeights::common(source_, case_.placement), case_.options));
    return memory;
  }
  std::vector<DeviceInput> inputs() {
    std::vector<DeviceInput> all;
    for (LayerPlace& place : places_)
      all.push_back({place.tokens.data(), place.hidden.data(), place.ids.data(), place.weights.data(), {}});
    return all;
  }
  std::vector<bf16*> outputs() {
    std::vector<bf16*> all;
    for (LayerPlace& place : places_) all.push_back(place.out.data());
    return all;
  }
  std::vector<bf16> fetch() {
    std::vector<bf16> all;
    for (std::size_t local = 0; local < places_.size(); ++local) {
      const std::vector<bf16> out = places_[local].out.read();
      const auto values = static_cast<std::size_t>(case_.tokens[static_cast<std::size_t>(rank_of(local))]) * hidden();
      all.insert(all.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(values));
      places_[local].out.poison();
    }
    check(cudaDeviceSynchronize(), "outputs");
    return all;
  }

  Case case_;
  SyntheticLayer synthetic_;
  LayerSource source_;
  LayerWeights common_;
  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  cudaStream_t stream_ = nullptr;
  std::vector<LayerPlace> places_;
  std::optional<DeviceLayer> plain_;
  std::optional<DeviceBalancedLayer> layer_;
};

/// The bits of a layer without copies through all changes, each of which takes several calls; switches behind the same calls.
void expect_changes(const Case& c, const std::vector<ReplicaMap>& maps, std::uint64_t seed, Group& group,
                    const DeviceGroupOptions& mine) {
  BalancingOptions balancing;
  balancing.copy_bytes = 100'000;
  BalancedProcess run(c, maps[0], balancing, group, mine);
  run.load(draw_tokens(c, seed));
  const std::vector<bf16> wanted = run.without_copies();
  std::size_t next = 1;
  std::string switched_behind;
  int calls = 0;
  for (; calls < 400 && run.layer().report().switches + 1 < static_cast<std::int64_t>(maps.size()); ++calls) {
    if (!run.layer().is_moving()) run.layer().move_to(maps[next++]);
    const std::int64_t before = run.layer().report().switches;
    run.call();
    if (run.layer().report().switches != before) switched_behind += std::to_string(calls) + " ";
    if (calls % 3 == 0) {
      EXPECT_EQ(different_bits(run.waited_for(), wanted), 0u) << "call " << calls;
    }
  }
  EXPECT_TRUE(run.layer().map() == maps.back()) << "behind " << calls << " calls";
  run.call();
  EXPECT_EQ(different_bits(run.waited_for(), wanted), 0u) << "behind the last change";
  for (const std::string& theirs : group.exchange(switched_behind, "switches of a balanced layer"))
    EXPECT_EQ(theirs, switched_behind) << "processes switch behind the same calls";
  run.layer().close();
}

TEST(ProcessBalancingGpu, ExpertsCrossBetweenProcesses) {
  if (gpus_for_processes() == 0) GTEST_SKIP() << "no GPU here";
  const bool time_sliced = gpus_for_processes() < processes;
  const std::uint64_t seed = balancing_test::announced_seed();
  const std::string name = "test.gpu.balancing." + std::to_string(getpid());
  const auto statuses = run_processes(processes, [&](int process) {
    const auto group = join_process_group(name, process, processes, {std::chrono::milliseconds(60000)});
    see_only_gpu(time_sliced ? 0 : process);
    const DeviceGroupOptions mine{1 + process, {0}, std::chrono::seconds(60)};
    for (const Way way : {Way::low_latency, Way::mega}) {
      for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::bf16}) {
        Case c = plain_case(3, kind);
        c.options.way = way;
        SCOPED_TRACE(testing::Message() << text_of(c) << ", process " << process);
        std::mt19937_64 random(seed);
        std::vector<ReplicaMap> maps;
        for (int i = 0; i < 3; ++i) maps.push_back(balancing_test::random_map(random, c.layer.shape.experts, 3, 6));
        expect_changes(c, maps, seed, *group, mine);
        if (testing::Test::HasFailure()) return;
      }
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << "exit statuses; 1: an expectation failed, 3: an exception, both said above";
  EXPECT_EQ(sockets_left("test.gpu."), 0);
}

}  // namespace
}  // namespace heddle::layer_test
