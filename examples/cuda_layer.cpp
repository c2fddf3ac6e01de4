// A layer on one GPU as eight ranks: two ways of the round trip and the fused layer, which have to give the same bits, each
// captured in a graph and timed. Only public headers and the CUDA runtime. Needs a Hopper GPU.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <heddle/device_layer.hpp>
#include <random>
#include <stdexcept>
#include <vector>

using namespace heddle;

constexpr int ranks = 8, experts = 16, topk = 4, hidden = 1024, intermediate = 512, tokens = 32, replays = 100;

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

// Calls a layer of this way and leaves the outputs in `out`, a pointer a rank. Returns microseconds of a replay.
static double run(Way way, Reduce reduce, const LayerSource& source, std::span<const DeviceInput> inputs,
                  std::span<bf16* const> out) {
  LayerOptions options;
  options.way = way;
  options.reduce = reduce;
  options.cap = tokens;
  const Placement placement = Placement::contiguous(experts, ranks);
  std::vector<LayerWeights> weights;
  for (int rank = 0; rank < ranks; ++rank) weights.push_back(LayerWeights::load(source, placement, rank));
  const ExchangeMemory memory = exchange_memory(exchange_options(weights[0], options));
  DeviceWorkspace workspace({ranks, {0}, std::chrono::seconds(10)}, memory.heap_bytes(ranks));
  DeviceLayer layer(workspace, 0, memory, weights, options);

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaStreamCreate(&stream));
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.forward(inputs, {tokens, Phase::decode}, out, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  check(cudaGraphLaunch(executable, stream));  // the first one is slower
  check(cudaEventRecord(begin, stream));
  for (int i = 0; i < replays; ++i) check(cudaGraphLaunch(executable, stream));
  check(cudaEventRecord(end, stream));
  check(cudaStreamSynchronize(stream));
  layer.throw_if_failed();
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  check(cudaStreamDestroy(stream));
  return milliseconds * 1e3 / replays;
}

int main() try {
  std::mt19937 random(1);
  std::vector<std::vector<bf16>> values;
  for (int i = 0; i < 3 * experts; ++i) values.push_back(random_values(random, std::size_t{hidden} * intermediate, 0.03f));
  LayerSource source;
  source.shape = {hidden, intermediate, experts, topk, {}};
  source.expert = [&](int e) {
    const auto* of_expert = &values[3 * static_cast<std::size_t>(e)];
    return ExpertWeights{matrix_of(of_expert[0], intermediate, hidden), matrix_of(of_expert[1], intermediate, hidden),
                         matrix_of(of_expert[2], hidden, intermediate)};
  };

  constexpr std::size_t outputs = std::size_t{tokens} * hidden;
  std::vector<DeviceInput> inputs;
  std::vector<bf16*> out;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int32_t> ids;
    for (int token = 0; token < tokens; ++token) {
      for (int choice = 0; choice < topk; ++choice) ids.push_back((7 * token + 5 * choice + rank) % experts);
    }
    inputs.push_back({on_gpu(std::vector<int>{tokens}),
                      on_gpu(random_values(random, outputs, 1.0f)),
                      on_gpu(ids),
                      on_gpu(std::vector<float>(ids.size(), 0.25f)),
                      {}});
    out.push_back(on_gpu(std::vector<bf16>(outputs)));
  }

  struct Form {
    const char* name;
    Way way;
    Reduce reduce;
  };
  std::vector<bf16> first;
  std::size_t different = 0, zeros = 0;
  for (const Form& form : {Form{"low_latency", Way::low_latency, Reduce::rank}, Form{"elastic", Way::elastic, Reduce::home},
                           Form{"mega", Way::mega, Reduce::rank}}) {
    const double time = run(form.way, form.reduce, source, inputs, out);
    std::vector<bf16> all;
    for (const bf16* of_rank : out) {
      all.resize(all.size() + outputs);
      check(cudaMemcpy(&*(all.end() - outputs), of_rank, outputs * sizeof(bf16), cudaMemcpyDeviceToHost));
    }
    std::printf("%s: %.1f us a call of %d ranks with %d tokens each\n", form.name, time, ranks, tokens);
    if (first.empty()) first = all;
    for (std::size_t i = 0; i < first.size(); ++i) {
      different += first[i].bits != all[i].bits ? 1 : 0;
      zeros += to_float(all[i]) == 0.0f ? 1 : 0;
    }
  }
  std::printf("%zu outputs differ from the first %zu, %zu are zero\n", different, first.size(), zeros);
  return different == 0 && zeros < first.size() / 2 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
