// A layer over two processes with GPUs of their own, ranks as threads in each: every rank's outputs and its report are the
// host engine's. On one GPU the processes take turns.
#include <thread>

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

}  // namespace
}  // namespace heddle::layer_test
