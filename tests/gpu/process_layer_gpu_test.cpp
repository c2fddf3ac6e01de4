// A layer over two processes with GPUs of their own, ranks as threads in each: every rank's outputs and its report are the
// host engine's, and the fused layer's outputs its chain's. On one GPU the processes take turns.
#include <array>
#include <optional>
#include <thread>

#include "gpu/mega_bed.hpp"
#include "gpu/process_run.hpp"
#include "layer/cuda_ranks.hpp"
#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

constexpr int processes = 2;

#define SKIP_WITHOUT_GPUS() \
  if (gpus_for_processes() == 0) GTEST_SKIP() << "no GPU here"

/// Small layers with uneven batches on 2 + 3 ranks, one of each way.
Case case_of(const Route& route) {
  Case c;
  c.layer.shape.hidden = 128;
  c.layer.shape.intermediate = 64;
  c.layer.shape.experts = 11;
  c.layer.shape.topk = 3;
  c.layer.kind = WeightKind::fp8_block;
  c.layer.shared_kind = WeightKind::bf16;
  c.layer.shared_intermediate = 64;
  c.layer.seed = 7;
  c.placement = Placement::contiguous(11, 5);
  c.tokens = {9, 0, 4, 7, 1};
  c.options.cap = 9;
  c.seed = 3;
  c.take(route);
  return c;
}

void run_own_ranks(const Case& c, Group& group, const DeviceGroupOptions& mine) {
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, c.seed);
  const Outcome host = run_layer(source, c, tokens);
  const LayerWeights weights = LayerWeights::load(source, c.placement, 0);
  const ExchangeOptions exchange = exchange_options(weights, c.options);
  const ExchangeMemory memory = exchange_memory(exchange);
  DeviceWorkspace workspace(group, mine, memory.heap_bytes(c.ranks()), describe(weights, c.options));
  DeviceRanks ranks(workspace, exchange, memory, std::chrono::seconds(60));
  std::vector<std::jthread> threads;
  for (int rank = ranks.first_rank(); rank < ranks.first_rank() + ranks.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        MoeLayer own(ranks.seat(rank), LayerWeights::load(source, c.placement, rank), c.options);
        for (int i = 0; i < 3; ++i) {
          ranks.meet(rank, "start of a call");
          EXPECT_EQ(different_bits(call(c, own, tokens, rank), part_of(c, host.outputs, rank)), 0u)
              << "rank " << rank << " call " << i;
        }
        const LayerReport& want = host.reports[static_cast<std::size_t>(rank)];
        EXPECT_EQ(own.report().rows_sent, want.rows_sent) << "rank " << rank;
        EXPECT_EQ(own.report().rows_received, want.rows_received) << "rank " << rank;
        EXPECT_EQ(own.report().rows_real, want.rows_real) << "rank " << rank;
        EXPECT_EQ(own.report().dispatch.remote_bytes, want.dispatch.remote_bytes) << "rank " << rank;
        EXPECT_EQ(own.report().combine.remote_bytes, want.combine.remote_bytes) << "rank " << rank;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
}

TEST(ProcessLayerGpu, EveryWayGivesTheHostEnginesBits) {
  SKIP_WITHOUT_GPUS();
  const bool time_sliced = gpus_for_processes() < processes;
  const std::string name = "test.gpu.layer." + std::to_string(getpid());
  const auto statuses = run_processes(processes, [&](int process) {
    const auto group = join_process_group(name, process, processes, {std::chrono::milliseconds(60000)});
    see_only_gpu(time_sliced ? 0 : process);
    const DeviceGroupOptions mine{2 + process, {0}, std::chrono::seconds(60)};
    for (const Route& route : all_routes) {
      const Case c = case_of(route);
      SCOPED_TRACE(testing::Message() << text_of(c) << ", process " << process);
      run_own_ranks(c, *group, mine);
      if (testing::Test::HasFailure()) return;
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << "exit statuses; 1: an expectation failed, 3: an exception, both said above";
  EXPECT_EQ(sockets_left("test.gpu."), 0);
}

/// The fused layer is no exchange with seats: a DeviceLayer a process, and the chain beside it in the same workspace.
class FusedProcess {
 public:
  FusedProcess(const Case& c, Group& group, const DeviceGroupOptions& mine)
      : case_(c),
        chain_case_(chain_of(c)),
        synthetic_(c.layer),
        source_(source_of(synthetic_, c)),
        memory_(memory_of_both()),
        workspace_(group, mine, memory_.heap_bytes(c.ranks()), describe(weights_of(0), c.options)) {
    check(cudaSetDevice(workspace_.device(0)), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    std::vector<LayerWeights> weights;
    for (int local = 0; local < mine.ranks; ++local) {
      weights.push_back(weights_of(workspace_.first_rank(0) + local));
      places_.emplace_back(workspace_.device(0), static_cast<std::size_t>(c.options.cap), hidden(), topk());
    }
    fused_.emplace(workspace_, 0, memory_, weights, c.options);
    chain_.emplace(workspace_, 0, memory_, weights, chain_case_.options);
    load(draw_tokens(c, c.seed));
  }
  ~FusedProcess() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  FusedProcess(const FusedProcess&) = delete;

  /// The own ranks' outputs, one rank behind the other.
  std::vector<bf16> fused() { return call(*fused_); }
  std::vector<bf16> chain() { return call(*chain_); }

 private:
  std::size_t hidden() const { return static_cast<std::size_t>(case_.layer.shape.hidden); }
  std::size_t topk() const { return static_cast<std::size_t>(case_.layer.shape.topk); }
  LayerWeights weights_of(int rank) { return LayerWeights::load(source_, case_.placement, rank); }
  ExchangeMemory memory_of_both() {
    ExchangeMemory memory = exchange_memory(exchange_options(weights_of(0), case_.options));
    memory.include(exchange_memory(exchange_options(weights_of(0), chain_case_.options)));
    return memory;
  }
  void load(const Tokens& tokens) {
    for (std::size_t local = 0; local < places_.size(); ++local)
      places_[local].load(input_of(case_, tokens, workspace_.first_rank(0) + static_cast<int>(local)), hidden(), topk());
    check(cudaStreamSynchronize(nullptr), "copies of inputs");
  }
  std::vector<bf16> call(DeviceLayer& layer) {
    std::vector<DeviceInput> inputs;
    std::vector<bf16*> outputs;
    for (LayerPlace& place : places_) {
      inputs.push_back({place.tokens.data(), place.hidden.data(), place.ids.data(), place.weights.data(), {}});
      outputs.push_back(place.out.data());
    }
    layer.forward(inputs, step_of(case_), outputs, stream_);
    check(cudaStreamSynchronize(stream_), "a call of a layer");
    layer.throw_if_failed();
    std::vector<bf16> all;
    for (std::size_t local = 0; local < places_.size(); ++local) {
      const std::vector<bf16> out = places_[local].out.read();
      const auto rank = static_cast<std::size_t>(workspace_.first_rank(0)) + local;
      const auto values = static_cast<std::size_t>(case_.tokens[rank]) * hidden();
      all.insert(all.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(values));
    }
    return all;
  }

  Case case_, chain_case_;
  SyntheticLayer synthetic_;
  LayerSource source_;
  ExchangeMemory memory_;
  DeviceWorkspace workspace_;
  cudaStream_t stream_ = nullptr;
  std::vector<LayerPlace> places_;
  std::optional<DeviceLayer> fused_, chain_;
};

// A rank a GPU, whose launches overlap, and several, which are launched whole.
TEST(ProcessLayerGpu, TheFusedLayerHasTheChainsBits) {
  SKIP_WITHOUT_GPUS();
  const bool time_sliced = gpus_for_processes() < processes;
  const std::string name = "test.gpu.fused." + std::to_string(getpid());
  const auto statuses = run_processes(processes, [&](int process) {
    const auto group = join_process_group(name, process, processes, {std::chrono::milliseconds(60000)});
    see_only_gpu(time_sliced ? 0 : process);
    for (const auto& ranks : {std::array{1, 1}, std::array{2, 3}}) {  // of each process
      const DeviceGroupOptions mine{ranks[static_cast<std::size_t>(process)], {0}, std::chrono::seconds(60)};
      for (const WeightKind kind : fused_kinds) {
        const Case c = with_shared(fused_case(ranks[0] + ranks[1], kind), kind, false);
        SCOPED_TRACE(testing::Message() << text_of(c) << ", process " << process);
        FusedProcess run(c, *group, mine);
        for (int i = 0; i < 3; ++i) {
          const std::vector<bf16> wanted = run.chain();
          EXPECT_EQ(different_bits(run.fused(), wanted), 0u) << "call " << i;
        }
        if (testing::Test::HasFailure()) return;
      }
    }
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << "exit statuses; 1: an expectation failed, 3: an exception, both said above";
  EXPECT_EQ(sockets_left("test.gpu."), 0);
}

}  // namespace
}  // namespace heddle::layer_test
