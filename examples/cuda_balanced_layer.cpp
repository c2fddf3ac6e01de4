// A layer on one GPU as four ranks, with eight more copies than experts, whose placement follows the load between replays of one
// graph: some experts are busy, then others. Only public headers and the CUDA runtime. Needs a Hopper GPU; docs/balancing.md says
// how.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <heddle/device_balancing.hpp>
#include <random>
#include <stdexcept>
#include <vector>

using namespace heddle;

constexpr int ranks = 4, experts = 16, extra = 8, topk = 2, hidden = 512, intermediate = 256, tokens = 64, calls = 60;

static void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

static std::vector<bf16> random_values(std::mt19937& random, std::size_t count, float size) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<bf16> values(count);
  for (bf16& value : values) value = to_bf16(normal(random));
  return values;
}

// A copy in the GPU's memory, which lives as long as the program.
template <class T>
static T* on_gpu(const std::vector<T>& values) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, values.size() * sizeof(T)));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(memory);
}

static WeightMatrix matrix_of(const std::vector<bf16>& values, int rows, int cols) {
  return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(values)), {}, ScaleFormat::f32, 1.0f};
}

// Rows of the busiest rank; tokens * topk are even.
static int busiest(const ReplicaMap& map, const Routing& routing) {
  const std::vector<int> tokens_of_rank(ranks, tokens);
  std::vector<int> rows(ranks, 0);
  for (const std::int32_t copy : choose_copies(map, CopyRule::levelled, routing, tokens_of_rank).ids)
    ++rows[static_cast<std::size_t>(map.placement().rank_of(copy))];
  return *std::max_element(rows.begin(), rows.end());
}

int main() try {
  std::mt19937 random(1);
  std::vector<std::vector<bf16>> values;
  for (int i = 0; i < 3 * experts; ++i) values.push_back(random_values(random, std::size_t{hidden} * intermediate, 0.05f));
  LayerSource source;
  source.shape = {hidden, intermediate, experts, topk, {}};
  source.expert = [&](int e) {
    const auto* of_expert = &values[3 * static_cast<std::size_t>(e)];
    return ExpertWeights{matrix_of(of_expert[0], intermediate, hidden), matrix_of(of_expert[1], intermediate, hidden),
                         matrix_of(of_expert[2], hidden, intermediate)};
  };

  // Nothing is known of the loads yet.
  const ReplicaMap first = balance_experts(std::vector<double>(experts, 1.0), {ranks, extra, 1, {}});
  LayerOptions options;
  options.way = Way::low_latency;
  options.cap = tokens;
  const LayerSource physical = physical_source(source, first);
  const ContextLayer context{&physical, first.placement(), options};
  const ContextPlan plan = plan_context({&context, 1});
  DeviceWorkspace workspace({ranks, {0}, std::chrono::seconds(10)}, plan.heap_bytes);
  BalancingOptions balancing;
  balancing.every = 8;             // calls between looks at the loads
  balancing.copy_bytes = 1 << 20;  // that a GPU sends between two calls at most
  DeviceBalancedLayer layer(workspace, plan.memory, source, first, options, balancing);

  constexpr std::size_t pairs = std::size_t{tokens} * topk;
  std::vector<DeviceInput> inputs;
  std::vector<std::int32_t*> ids;
  std::vector<bf16*> out;
  for (int rank = 0; rank < ranks; ++rank) {
    ids.push_back(on_gpu(std::vector<std::int32_t>(pairs, -1)));
    inputs.push_back({on_gpu(std::vector<int>{tokens}),
                      on_gpu(random_values(random, std::size_t{tokens} * hidden, 1.0f)),
                      ids.back(),
                      on_gpu(std::vector<float>(pairs, 0.5f)),
                      {}});
    out.push_back(on_gpu(std::vector<bf16>(std::size_t{tokens} * hidden)));
  }

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.forward(0, inputs, {tokens, Phase::decode}, out, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  int last = 0;
  for (const std::uint64_t text : {7u, 8u}) {
    const Routing routing = draw_routing(zipf_popularity(experts, 1.5, text), {ranks * tokens, topk, text, 0.0, 1.0f});
    for (std::size_t rank = 0; rank < ids.size(); ++rank)
      check(cudaMemcpy(ids[rank], routing.ids.data() + rank * pairs, pairs * sizeof(std::int32_t), cudaMemcpyHostToDevice));
    const int before = busiest(layer.map(), routing);
    for (int call = 0; call < calls; ++call) {
      check(cudaGraphLaunch(executable, stream));
      layer.follow({&stream, 1});
    }
    check(cudaStreamSynchronize(stream));
    layer.throw_if_failed();
    last = busiest(layer.map(), routing);
    std::printf("%d replays: the busiest rank has %d rows instead of %d, %d are even\n", calls, last, before, tokens * topk);
  }
  const BalancingReport& report = layer.report();
  std::printf("%lld switches, %lld experts came to ranks\n", static_cast<long long>(report.switches),
              static_cast<long long>(report.moved));
  layer.close();
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return last < tokens * topk * 5 / 4 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
