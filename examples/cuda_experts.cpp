// The experts of one GPU as a class: weights loaded once, a routed call captured in a graph, its results held against the host
// engine's, its time. Only public headers and the CUDA runtime. Needs a Hopper GPU.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <heddle/device_experts.hpp>
#include <heddle/experts.hpp>
#include <random>
#include <stdexcept>
#include <vector>

using namespace heddle;

constexpr int experts = 8, topk = 2, hidden = 1024, intermediate = 512, tokens = 64, replays = 100;

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

static RowView rows_of(const bf16* values) {
  return {Activation::bf16, reinterpret_cast<const std::byte*>(values), hidden * sizeof(bf16)};
}

// Microseconds of a replay.
template <class Call>
static double time_of(cudaStream_t stream, const Call& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  call();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaGraphLaunch(executable, stream));  // the first one is slower
  check(cudaEventRecord(begin, stream));
  for (int i = 0; i < replays; ++i) check(cudaGraphLaunch(executable, stream));
  check(cudaEventRecord(end, stream));
  check(cudaStreamSynchronize(stream));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  return milliseconds * 1000.0 / replays;
}

static int run() {
  std::mt19937 random(1);
  std::vector<std::vector<bf16>> storage;
  const auto matrix = [&](int rows, int cols) {
    storage.push_back(random_values(random, static_cast<std::size_t>(rows) * cols, 1.0f / std::sqrt(static_cast<float>(cols))));
    return WeightMatrix{WeightKind::bf16, rows, cols, std::as_bytes(std::span(storage.back())), {}};
  };
  std::vector<ExpertWeights> weights;
  for (int e = 0; e < experts; ++e)
    weights.push_back({matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate)});

  const std::vector<bf16> input = random_values(random, tokens * hidden, 1.0f);
  std::vector<std::int32_t> ids;
  for (int t = 0; t < tokens; ++t)
    ids.insert(ids.end(), {t % experts, (3 * t + 1) % experts == t % experts ? -1 : (3 * t + 1) % experts});
  const std::vector<float> choice_weights(tokens * topk, 0.5f);

  ExpertOptions options;
  options.activation = Activation::bf16;
  DeviceExpertsOptions device;
  device.most_rows = tokens * topk;
  device.most_tokens = tokens;
  device.topk = topk;
  DeviceExperts on_device(weights, hidden, intermediate, options, device);
  std::printf("%d experts: %.1f MB of weights laid out in %.3f s\n", experts, on_device.report().device_bytes / 1e6,
              on_device.report().seconds);

  const RowView rows = rows_of(on_gpu(input));
  const std::int32_t* device_ids = on_gpu(ids);
  const float* device_weights = on_gpu(choice_weights);
  std::vector<bf16> output(tokens * hidden), expected(tokens * hidden);
  bf16* device_output = on_gpu(output);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  const double microseconds = time_of(stream, [&] {
    on_device.routed(rows, tokens, topk, device_ids, device_weights, RoutedOutput::sum, {device_output}, stream);
  });
  on_device.throw_if_failed();
  check(cudaMemcpy(output.data(), device_output, output.size() * sizeof(bf16), cudaMemcpyDeviceToHost));

  const HostExperts on_host(weights, hidden, intermediate, options);
  on_host.routed(rows_of(input.data()), tokens, topk, ids.data(), choice_weights.data(), RoutedOutput::sum, {expected.data()});
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < output.size(); ++i) {
    error += std::pow(to_float(output[i]) - to_float(expected[i]), 2);
    norm += std::pow(to_float(expected[i]), 2);
  }
  const double off = std::sqrt(error / norm);
  std::printf(
      "%d tokens, %d choices each: %.1f us a call, weights warm in the L2; off the host engine by %.1e of the norm (may be 4e-3)\n",
      tokens, topk, microseconds, off);
  return off <= 4e-3 ? 0 : 1;
}

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
