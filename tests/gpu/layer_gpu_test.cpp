// A layer whose rows travel between GPUs and whose experts stay on the host: outputs and reports are those of the host
// engine, bit for bit and row for row.
#include <cuda_runtime.h>

#include <cstdlib>
#include <thread>

#include "heddle/device.hpp"
#include "layer/cuda_ranks.hpp"
#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

int gpus_here() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  const char* wanted = std::getenv("HEDDLE_GPUS");
  return wanted == nullptr ? count : std::min(count, std::atoi(wanted));
}

#define SKIP_WITHOUT_GPU() \
  if (gpus_here() == 0) GTEST_SKIP() << "no GPU here"

DeviceGroupOptions group_of(int ranks, std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
  DeviceGroupOptions group{ranks, {}, deadline};
  for (int gpu = 0; gpu < std::min(gpus_here(), ranks); ++gpu) group.devices.push_back(gpu);
  return group;
}

ExchangeOptions exchange_of(const LayerSource& source, const Case& c) {
  return exchange_options(LayerWeights::load(source, c.placement, 0), c.options);
}

/// A thread for each rank of `ranks`; what one throws is its error text.
std::vector<std::string> run_threads(const DeviceRanks& ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks.ranks()));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

/// As run_layer, with rows that travel on GPUs; called `calls` times.
Outcome run_on_gpus(const LayerSource& source, const Case& c, const Tokens& tokens, int calls) {
  const ExchangeOptions exchange = exchange_of(source, c);
  const ExchangeMemory memory = exchange_memory(exchange);
  DeviceWorkspace workspace(group_of(c.ranks()), memory.heap_bytes(c.ranks()));
  DeviceRanks ranks(workspace, exchange, memory, std::chrono::seconds(30));
  Outcome outcome;
  outcome.reports.resize(static_cast<std::size_t>(c.ranks()));
  std::vector<std::vector<bf16>> outs(outcome.reports.size());
  const auto errors = run_threads(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    MoeLayer layer(ranks.seat(rank), LayerWeights::load(source, c.placement, rank), c.options);
    outs[r] = call(c, layer, tokens, rank);
    for (int i = 1; i < calls; ++i) EXPECT_EQ(different_bits(call(c, layer, tokens, rank), outs[r]), 0u) << "call " << i;
    outcome.reports[r] = layer.report();
  });
  for (std::size_t rank = 0; rank < errors.size(); ++rank) EXPECT_EQ(errors[rank], "") << "rank " << rank;
  EXPECT_EQ(ranks.kernels_launched(), static_cast<std::uint64_t>(4 * calls) * workspace.gpus());
  for (std::size_t rank = 0; rank < outs.size(); ++rank) {
    const auto& out = outs[rank];
    if (c.options.tensor_parallel) {
      EXPECT_EQ(different_bits(out, outs[0]), 0u) << "rank " << rank << " has other outputs than rank 0";
    }
    if (rank == 0 || !c.options.tensor_parallel) outcome.outputs.insert(outcome.outputs.end(), out.begin(), out.end());
  }
  return outcome;
}

void expect_same_report(const LayerReport& gpu, const LayerReport& host, std::size_t rank) {
  SCOPED_TRACE(testing::Message() << "report of rank " << rank);
  EXPECT_EQ(gpu.rows_sent, host.rows_sent);
  EXPECT_EQ(gpu.rows_received, host.rows_received);
  EXPECT_EQ(gpu.rows_real, host.rows_real);
  EXPECT_EQ(gpu.layout, host.layout);
  EXPECT_EQ(gpu.dispatch.remote_bytes, host.dispatch.remote_bytes);
  EXPECT_EQ(gpu.dispatch.local_bytes, host.dispatch.local_bytes);
  EXPECT_EQ(gpu.combine.remote_bytes, host.combine.remote_bytes);
  EXPECT_EQ(gpu.combine.local_bytes, host.combine.local_bytes);
  EXPECT_EQ(gpu.gemm1.local_bytes, host.gemm1.local_bytes);
}

void expect_the_host_engines(const Case& c) {
  SCOPED_TRACE(text_of(c));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, c.seed);
  const Outcome host = run_layer(source, c, tokens);
  const Outcome gpu = run_on_gpus(source, c, tokens, 2);
  ASSERT_EQ(different_bits(gpu.outputs, host.outputs), 0u);
  for (std::size_t rank = 0; rank < host.reports.size(); ++rank) expect_same_report(gpu.reports[rank], host.reports[rank], rank);
}

/// Case n of a random series, by a way of all.
Case nth_case(std::uint64_t seed) {
  Chance chance(seed + 99);
  Case c = random_case(seed, chance.one_of({1, 2, 3, 5, 8}));
  c.take(all_routes[seed % std::size(all_routes)]);
  c.options.runner = random_runner(chance, c.options.way);
  if (chance.one_in(4)) make_tensor_parallel(c);
  return c;
}

TEST(LayerGpu, RandomLayersGiveTheHostEnginesBits) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < 60 && !::testing::Test::HasFailure(); ++i) expect_the_host_engines(nth_case(seed + i));
}

TEST(LayerGpu, EveryWayAndRunner) {
  SKIP_WITHOUT_GPU();
  for (const Route& route : all_routes) {
    for (const RunnerKind runner : {RunnerKind::automatic, RunnerKind::contiguous, RunnerKind::masked, RunnerKind::routed}) {
      for (const SharedMode shared : {SharedMode::alone, SharedMode::fused}) {
        if (!allows_layout(route.way, layout_of(route.way, runner))) continue;
        Case c;
        c.layer.shape.hidden = 256;
        c.layer.shape.intermediate = 128;
        c.layer.shape.experts = 12;
        c.layer.shape.topk = 4;
        c.layer.kind = WeightKind::mxfp4;
        c.layer.shared_kind = WeightKind::bf16;
        c.layer.shared_intermediate = 128;
        c.layer.seed = 5;
        c.placement = Placement::contiguous(12, 4);
        c.tokens = {17, 0, 5, 9};
        c.options.cap = 17;
        c.options.runner = runner;
        c.options.shared = shared;
        c.take(route);
        expect_the_host_engines(c);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// A rank refuses its batch: it gets the InputError, all others its fault at once, no thread and no kernel waits. After a
// reset the next calls are right.
TEST(LayerGpu, ARefusedBatchEndsAllCalls) {
  SKIP_WITHOUT_GPU();
  for (std::uint64_t way = 0; way < std::size(all_routes); ++way) {
    Case c = random_case(17 + way, 4);
    c.take(all_routes[way]);
    c.options.cpu_sync = false;
    c.options.cap = 9;
    c.tokens = {3, 3, 3, 3};
    c.placement = Placement::contiguous(c.layer.shape.experts, 4);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    const ExchangeOptions exchange = exchange_of(source, c);
    const ExchangeMemory memory = exchange_memory(exchange);
    DeviceWorkspace workspace(group_of(4), memory.heap_bytes(4));
    DeviceRanks ranks(workspace, exchange, memory, std::chrono::seconds(30));
    const auto since = std::chrono::steady_clock::now();
    const auto errors = run_threads(ranks, [&](int rank) {
      MoeLayer own(ranks.seat(rank), LayerWeights::load(source, c.placement, rank), c.options);
      LayerInput input = input_of(c, tokens, rank);
      if (rank == 2) input.ids = nullptr;
      std::vector<bf16> out(3 * static_cast<std::size_t>(c.layer.shape.hidden));
      own.forward(input, step_of(c), out.data());
    });
    EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(20)) << "somebody waited for a deadline";
    for (std::size_t rank = 0; rank < 4; ++rank) {
      const char* part = rank == 2 ? "rank 2 brings 3 tokens without" : "rank 2 gave up in input check";
      EXPECT_NE(errors[rank].find(part), std::string::npos)
          << "rank " << rank << " should say \"" << part << "\": " << errors[rank];
    }
    EXPECT_THROW(workspace.throw_if_aborted(), FaultError);
    workspace.reset();
    ranks.begin_again();
    const std::vector<bf16> want = run_layer(source, c, tokens).outputs;
    const auto later = run_threads(ranks, [&](int rank) {
      MoeLayer own(ranks.seat(rank), LayerWeights::load(source, c.placement, rank), c.options);
      EXPECT_EQ(different_bits(call(c, own, tokens, rank), part_of(c, want, rank)), 0u) << "rank " << rank << " after the reset";
    });
    EXPECT_EQ(later, std::vector<std::string>(4)) << "errors of ranks after the reset";
  }
}

TEST(LayerGpu, TensorParallelByEveryWay) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t way = 0; way < std::size(all_routes); ++way) {
    Case c = random_case(seed + way, 4);
    c.take(all_routes[way]);
    c.options.cpu_sync = c.options.way == Way::elastic;
    make_tensor_parallel(c);
    expect_the_host_engines(c);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace heddle::layer_test
