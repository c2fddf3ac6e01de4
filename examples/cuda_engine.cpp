// How an engine calls Heddle: two layers of a model share one context whose memory is known before it is taken; tensors lie in the
// engine's own arena, calls are queued on its own stream behind its own work; a prefill of more tokens than the cap, then decode
// steps from a CUDA graph with another number of tokens each. Only public headers and the CUDA runtime. Needs a Hopper GPU.
#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>
#include <exception>
#include <heddle/device_layer.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

using namespace heddle;

constexpr int layers = 2, ranks = 2, experts = 16, topk = 4, hidden = 1024, intermediate = 512;
constexpr int cap = 32, prefill_tokens = 80, decode_steps = 5;

static void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// The engine's allocator: one piece of the GPU's memory, handed out from its beginning. What the layers take for themselves
// (weights, heap, buffers) they take when they are made, and nothing during a call.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) { check(cudaMalloc(&memory_, bytes)); }
  ~Arena() { cudaFree(memory_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* take(std::size_t count) {
    const std::size_t begin = (used_ + 255) / 256 * 256;
    if (begin + count * sizeof(T) > bytes_) throw std::runtime_error("the arena is full");
    used_ = begin + count * sizeof(T);
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_) + begin);
  }
  std::size_t used() const { return used_; }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_, used_ = 0;
};

// One layer's weights in host memory; a real engine opens a checkpoint (LayerCheckpoint, source_of and router_of).
struct Model {
  explicit Model(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.03f);
    for (auto& matrix : matrices) {
      matrix.resize(std::size_t{hidden} * intermediate);
      for (bf16& value : matrix) value = to_bf16(normal(random));
    }
    for (float& value : router) value = normal(random);
    source.shape = {hidden, intermediate, experts, topk, {}};
    source.expert = [this](int e) {
      return ExpertWeights{matrix(3 * e, intermediate, hidden), matrix(3 * e + 1, intermediate, hidden),
                           matrix(3 * e + 2, hidden, intermediate)};
    };
  }
  Model(const Model&) = delete;  // `source` has views
  Model& operator=(const Model&) = delete;
  WeightMatrix matrix(int number, int rows, int cols) const {
    return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(matrices[static_cast<std::size_t>(number)])), {}};
  }

  std::array<std::vector<bf16>, 3 * experts> matrices;
  std::vector<float> router = std::vector<float>(std::size_t{experts} * hidden);
  LayerSource source;
};

class Engine {
 public:
  Engine(const std::vector<const Model*>& models, std::size_t budget) : arena_(std::size_t{4} << 20) {
    LayerOptions options;
    options.way = Way::automatic;  // by the step's size
    options.cap = cap;
    options.overflow = Overflow::split;
    const Placement placement = Placement::contiguous(experts, ranks);
    std::vector<ContextLayer> context;
    for (const Model* model : models) context.push_back({&model->source, placement, options});
    const ContextPlan plan = plan_context(context);  // nothing is taken yet
    std::printf("a context of %zu layers: %.1f MB of heap a rank\n", models.size(), plan.heap_bytes / 1e6);
    if (plan.heap_bytes > budget) throw std::runtime_error("more than the engine has for it; a smaller cap takes less");

    workspace_.emplace(DeviceGroupOptions{ranks, {0}, std::chrono::seconds(10)}, plan.heap_bytes);
    for (const Model* model : models) {
      std::vector<LayerWeights> weights;
      for (int rank = 0; rank < ranks; ++rank) weights.push_back(LayerWeights::load(model->source, placement, rank));
      weights.front().router = LayerRouter{model->router, {}, {.topk = topk}};
      layers_.emplace_back(*workspace_, 0, plan.memory, weights, options);
      std::printf("a layer: %.1f MB of weights, %.1f MB of buffers\n", layers_.back().weight_bytes() / 1e6,
                  layers_.back().buffer_bytes() / 1e6);
    }
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    for (int rank = 0; rank < ranks; ++rank) {
      counts_.push_back(arena_.take<int>(1));
      for (int i = 0; i <= layers; ++i) states_[i].push_back(arena_.take<bf16>(std::size_t{prefill_tokens} * hidden));
    }
  }
  ~Engine() {
    if (decode_ != nullptr) cudaGraphExecDestroy(decode_);
    cudaStreamDestroy(stream_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Tokens of each rank, as hidden states, through all layers. `most`: the same on all ranks of a step, what the way is chosen by.
  std::vector<bf16> run(const std::vector<bf16>& tokens, int most, bool from_graph) {
    const int count = static_cast<int>(tokens.size()) / hidden;
    for (int rank = 0; rank < ranks; ++rank) {
      check(cudaMemcpyAsync(counts_[rank], &count, sizeof count, cudaMemcpyHostToDevice, stream_));
      check(cudaMemcpyAsync(states_[0][rank], tokens.data(), tokens.size() * sizeof(bf16), cudaMemcpyHostToDevice, stream_));
    }
    if (!from_graph) {
      queue(most);
    } else {
      if (decode_ == nullptr) capture(most);
      check(cudaGraphLaunch(decode_, stream_));
    }
    std::vector<bf16> out(tokens.size());
    check(cudaMemcpyAsync(out.data(), states_[layers][0], out.size() * sizeof(bf16), cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
    for (DeviceLayer& layer : layers_) layer.throw_if_failed();  // a rank that gave up has a name here
    return out;
  }
  std::size_t arena_bytes() const { return arena_.used(); }

 private:
  // What an engine's own kernels do between layers (attention, norms) would be queued on the same stream.
  void queue(int most) {
    for (int i = 0; i < layers; ++i) {
      std::vector<DeviceInput> inputs;
      for (int rank = 0; rank < ranks; ++rank) inputs.push_back({counts_[rank], states_[i][rank], nullptr, nullptr, {}});
      layers_[i].forward(inputs, {most, most > cap ? Phase::prefill : Phase::decode}, states_[i + 1], stream_);
    }
  }
  void capture(int most) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    queue(most);
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&decode_, graph, 0));
    check(cudaGraphDestroy(graph));
  }

  Arena arena_;
  std::optional<DeviceWorkspace> workspace_;
  std::vector<DeviceLayer> layers_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t decode_ = nullptr;
  std::vector<int*> counts_;               // by rank: how many tokens it brings, read by the kernels
  std::vector<bf16*> states_[layers + 1];  // by rank: before the first layer, between layers, behind the last
};

int main() try {
  const Model first(1), second(2);
  Engine engine({&first, &second}, std::size_t{1} << 30);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const auto draw = [&](int tokens) {
    std::vector<bf16> values(static_cast<std::size_t>(tokens) * hidden);
    for (bf16& value : values) value = to_bf16(normal(random));
    return values;
  };
  engine.run(draw(prefill_tokens), prefill_tokens, false);
  std::printf("prefill of %d tokens a rank, in passes of %d; %.1f MB of the arena used\n", prefill_tokens, cap,
              engine.arena_bytes() / 1e6);
  std::size_t different = 0;
  for (int step = 0; step < decode_steps; ++step) {
    const std::vector<bf16> tokens = draw(cap - 5 * step);  // requests end: the graph stays
    const std::vector<bf16> replayed = engine.run(tokens, cap, true), called = engine.run(tokens, cap, false);
    for (std::size_t i = 0; i < called.size(); ++i) different += called[i].bits != replayed[i].bits ? 1 : 0;
  }
  std::printf("%d decode steps: %zu values of the graph differ from those of plain calls\n", decode_steps, different);
  return different == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
