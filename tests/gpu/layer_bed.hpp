// Layers on the GPUs of this machine: one workspace, seats for all ranks, calls and captured calls.
#pragma once

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/buffers.hpp"
#include "gpu/waiting.hpp"
#include "heddle/device_layer.hpp"
#include "layer_support.hpp"

namespace heddle::layer_test {

/// GPUs that tests of the layer use.
inline int gpus_for(int ranks) { return std::min({gpus_here(), 2, ranks}); }

/// Weights of these kinds are multiplied as e4m3.
inline bool needs_fp8(WeightKind kind) { return kind == WeightKind::fp8_block || kind == WeightKind::mxfp4; }

/// A small layer on `ranks` ranks whose sizes are no multiples of the tiles.
inline Case plain_case(int ranks, WeightKind kind) {
  Case c;
  c.layer.shape = {448, 320, 13, 4, {}};
  c.layer.kind = kind;
  c.layer.seed = 7;
  c.placement = Placement::contiguous(c.layer.shape.experts, ranks);
  c.options.cap = 24;
  for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(rank % 3 == 1 ? 0 : (rank % 2 == 0 ? 24 : 7));
  return c;
}

inline Case with_shared(Case c, WeightKind kind, bool gated) {
  c.layer.shared_kind = kind;
  c.layer.shared_intermediate = c.layer.shape.intermediate;
  c.gated_shared = gated;
  return c;
}

/// Where a rank's tokens lie, and its outputs.
struct LayerPlace {
  Buffer<int> tokens;
  Buffer<bf16> hidden;
  Buffer<std::int32_t> ids;
  Buffer<float> weights;
  Buffer<bf16> out;

  LayerPlace(int device, std::size_t rows, std::size_t hidden_size, std::size_t topk)
      : tokens(device, 1),
        hidden(device, rows * hidden_size),
        ids(device, rows * topk),
        weights(device, rows * topk),
        out(device, rows * hidden_size) {}

  /// What a rank brings.
  void load(const LayerInput& input, std::size_t hidden_size, std::size_t topk) {
    const auto count = static_cast<std::size_t>(input.tokens);
    tokens.write({input.tokens});
    if (count == 0) return;
    hidden.write({input.hidden, input.hidden + count * hidden_size});
    ids.write({input.ids, input.ids + count * topk});
    weights.write({input.weights, input.weights + count * topk});
  }
};

/// A graph a GPU.
class LayerGraphs {
 public:
  LayerGraphs() = default;
  LayerGraphs(LayerGraphs&&) = default;
  LayerGraphs(const LayerGraphs&) = delete;
  ~LayerGraphs() {
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  }
  std::vector<cudaGraphExec_t> graphs;
};

/// Layers that share a workspace; each with a source and a case. Hidden size, k and ranks are the same for all.
class LayerBed {
 public:
  struct Given {
    const LayerSource* source;
    const Case* c;
  };
  LayerBed(const std::vector<Given>& given, const DeviceLayerOptions& device = {},
           std::chrono::milliseconds deadline = std::chrono::seconds(30))
      : first_(*given.front().c),
        hidden_(static_cast<std::size_t>(given.front().source->shape.hidden)),
        topk_(static_cast<std::size_t>(given.front().source->shape.topk)) {
    std::size_t rows = 0;
    for (const Given& one : given) {
      memory_.include(layer_memory(weights_of(one, 0), one.c->options));
      rows = std::max(rows, static_cast<std::size_t>(one.c->ranks()) * static_cast<std::size_t>(one.c->options.cap));
      rows = std::max(rows, static_cast<std::size_t>(one.c->all_tokens()));  // more than that where a call is split
    }
    const int ranks = first_.ranks();
    workspace_ =
        std::make_unique<DeviceWorkspace>(DeviceGroupOptions{ranks, devices(gpus_for(ranks)), deadline}, memory_.heap_bytes(ranks));
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_->device(gpu));
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      streams_.push_back(stream);
      for (int local = 0; local < workspace_->ranks_on(gpu); ++local) {
        places_.emplace_back(workspace_->device(gpu), rows, hidden_, topk_);
      }
    }
    layers_.resize(given.size());
    for (std::size_t i = 0; i < given.size(); ++i) {
      for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) {
        std::vector<LayerWeights> weights;
        for (int local = 0; local < workspace_->ranks_on(gpu); ++local) {
          weights.push_back(weights_of(given[i], workspace_->first_rank(gpu) + local));
        }
        layers_[i].emplace_back(*workspace_, gpu, memory_, weights, given[i].c->options, device);
      }
    }
    settle();
  }
  ~LayerBed() {
    for (cudaStream_t stream : streams_) {
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
  }
  LayerBed(const LayerBed&) = delete;

  DeviceWorkspace& workspace() { return *workspace_; }
  const ExchangeMemory& memory() const { return memory_; }
  DeviceLayer& layer(std::size_t number, std::size_t gpu) { return layers_[number][gpu]; }
  const std::vector<cudaStream_t>& streams() const { return streams_; }
  LayerPlace& place(int rank) { return places_[static_cast<std::size_t>(rank)]; }

  /// The tokens of a case into all seats; all else there is poisoned.
  void load(const Case& c, const Tokens& tokens) {
    for (int rank = 0; rank < c.ranks(); ++rank) {
      const LayerInput input = input_of(c, tokens, rank);
      LayerPlace& to = place(rank);
      const auto count = static_cast<std::size_t>(input.tokens);
      const auto fill = [](auto& buffer, const auto* from, std::size_t size) {
        buffer.poison();
        if (size > 0) buffer.write({from, from + size});
      };
      fill(to.tokens, &input.tokens, 1);
      fill(to.hidden, input.hidden, count * hidden_);
      fill(to.ids, input.ids, count * topk_);
      fill(to.weights, input.weights, count * topk_);
      to.out.poison();
    }
    settle();
  }

  void begin(std::size_t number, const Step& step) {
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) layer(number, gpu).begin(inputs(gpu), step, streams_[gpu]);
  }
  /// A call on one GPU alone.
  void call_on(std::size_t gpu, std::size_t number, const Step& step) {
    layer(number, gpu).forward(inputs(gpu), step, outputs(gpu), streams_[gpu]);
  }
  void end(std::size_t number) {
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) layer(number, gpu).end(outputs(gpu), streams_[gpu]);
  }
  void wait(std::size_t number, const std::string& what = "a call of a layer") {
    for (cudaStream_t stream : streams_) wait_for(stream, what, std::chrono::seconds(90));
    std::exception_ptr first;  // all are asked: what the experts of one GPU met in a call that was given up would be told later
    for (DeviceLayer& layer : layers_[number]) {
      try {
        layer.throw_if_failed();
      } catch (const Error&) {
        if (first == nullptr) first = std::current_exception();
      }
    }
    if (first != nullptr) std::rethrow_exception(first);
  }
  /// A call, waited for; the outputs.
  std::vector<bf16> call(const Case& c, std::size_t number = 0) {
    begin(number, step_of(c));
    end(number);
    wait(number, text_of(c));
    return fetch(c);
  }
  LayerGraphs capture(const Step& step, std::size_t number = 0) {
    return capture_calls([&](std::size_t gpu) { layer(number, gpu).forward(inputs(gpu), step, outputs(gpu), streams_[gpu]); });
  }
  /// `call` queues a GPU's part on its stream.
  LayerGraphs capture_calls(const std::function<void(std::size_t gpu)>& call) {
    LayerGraphs made;
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_->device(gpu));
      check(cudaStreamBeginCapture(streams_[gpu], cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      cudaGraph_t graph = nullptr;
      try {
        call(gpu);
      } catch (...) {
        cudaStreamEndCapture(streams_[gpu], &graph);
        if (graph != nullptr) cudaGraphDestroy(graph);
        throw;
      }
      check(cudaStreamEndCapture(streams_[gpu], &graph), "cudaStreamEndCapture");
      cudaGraphExec_t ready = nullptr;
      check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
      check(cudaGraphDestroy(graph), "cudaGraphDestroy");
      made.graphs.push_back(ready);
    }
    return made;
  }
  void launch(const LayerGraphs& graphs) {
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_->device(gpu));
      check(cudaGraphLaunch(graphs.graphs[gpu], streams_[gpu]), "cudaGraphLaunch");
    }
  }
  std::vector<bf16> replay(const LayerGraphs& graphs, const Case& c, std::size_t number = 0) {
    launch(graphs);
    wait(number, "a replay: " + text_of(c));
    return fetch(c);
  }

  /// The outputs of all tokens in the batch's order; nothing else may have been written, and inputs are as they were.
  std::vector<bf16> fetch(const Case& c) {
    std::vector<bf16> all;
    for (int rank = 0; rank < c.ranks(); ++rank) {
      LayerPlace& from = place(rank);
      const std::vector<bf16> out = from.out.read();
      const int tokens = c.options.tensor_parallel ? c.all_tokens() : c.tokens[static_cast<std::size_t>(rank)];
      const auto values = static_cast<std::size_t>(tokens) * hidden_;
      std::size_t written = 0;
      for (std::size_t i = values; i < out.size(); ++i) written += out[i].bits != (poison_byte << 8 | poison_byte) ? 1 : 0;
      EXPECT_EQ(written, 0u) << "values behind the " << tokens << " outputs of rank " << rank;
      const std::string whose = "rank " + std::to_string(rank);
      from.out.expect_guards(whose + ", outputs");
      from.hidden.expect_guards(whose + ", hidden states");
      if (c.options.tensor_parallel && rank > 0) {
        EXPECT_TRUE(std::equal(all.begin(), all.end(), out.begin(), [](bf16 a, bf16 b) { return a.bits == b.bits; }))
            << whose << " has other outputs than rank 0";
        continue;
      }
      all.insert(all.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(values));
    }
    return all;
  }

  std::vector<DeviceInput> inputs(std::size_t gpu) {
    std::vector<DeviceInput> all;
    for (int local = 0; local < workspace_->ranks_on(gpu); ++local) {
      LayerPlace& own = place(workspace_->first_rank(gpu) + local);
      all.push_back({own.tokens.data(), own.hidden.data(), own.ids.data(), own.weights.data(), {}});
    }
    return all;
  }
  std::vector<bf16*> outputs(std::size_t gpu) {
    std::vector<bf16*> all;
    for (int local = 0; local < workspace_->ranks_on(gpu); ++local)
      all.push_back(place(workspace_->first_rank(gpu) + local).out.data());
    return all;
  }

 private:
  static LayerWeights weights_of(const Given& one, int rank) { return LayerWeights::load(*one.source, one.c->placement, rank); }
  void settle() const {
    for (std::size_t gpu = 0; gpu < workspace_->gpus(); ++gpu) {
      const cuda::DeviceScope scope(workspace_->device(gpu));
      check(cudaStreamSynchronize(nullptr), "copies of inputs");
    }
  }

  Case first_;
  std::size_t hidden_, topk_;
  ExchangeMemory memory_;  ///< what the layers need together
  std::unique_ptr<DeviceWorkspace> workspace_;
  std::vector<cudaStream_t> streams_;
  std::vector<LayerPlace> places_;
  std::vector<std::vector<DeviceLayer>> layers_;  ///< [layer][GPU]
};

/// The bounds of docs/numerics.md between a GPU and the host engine. Small cases have a bound of their own and meet the page's
/// together: hardware keeps about 14 bits of an fp8 sum, and requantisation amplifies it.
class GpuBounds {
 public:
  void expect(const Case& c, const std::vector<bf16>& gpu, const std::vector<bf16>& host) {
    ASSERT_EQ(gpu.size(), host.size());
    const Activation activation = activation_of(c);
    const Comparison comparison = compare(gpu, host);
    EXPECT_FALSE(comparison.has_nan_mismatch) << text_of(c);
    EXPECT_LE(comparison.relative_error, bound_of_one(c, activation)) << text_of(c);
    Pool& pool = pools_[activation == Activation::fp8 ? 0 : 1][c.options.combine_wire == Wire::bf16 ? 0 : 1];
    pool.gpu.insert(pool.gpu.end(), gpu.begin(), gpu.end());
    pool.host.insert(pool.host.end(), host.begin(), host.end());
    pool.pairs += static_cast<double>(c.all_tokens()) * c.layer.shape.topk * c.layer.shape.intermediate;
  }
  ~GpuBounds() {
    constexpr double bounds[] = {1.5e-2, 4e-3};
    constexpr double bound_of_nvfp4_returns = 2e-2;  // which some of the quantised ones are
    constexpr const char* names[] = {"fp8", "bf16"};
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t activation = i / 2;
      const bool quantised = i % 2 == 1;  // on the way back: two sums that round apart may take neighbouring codes
      const Pool& pool = pools_[activation][quantised ? 1 : 0];
      if (pool.gpu.empty()) continue;
      const double error = compare(pool.gpu, pool.host).relative_error;
      std::printf("%s activations, %s returns: error %.2e over tokens * k * D = %.3g\n", names[activation],
                  quantised ? "quantised" : "bf16", error, pool.pairs);
      if (pool.is_enough(quantised)) {
        const double bound = quantised && activation == 0 ? bound_of_nvfp4_returns : bounds[activation];
        EXPECT_LE(error, bound) << "over all cases with " << names[activation] << " activations";
      }
    }
  }
  /// Whether everything so far is held against the page's bounds: it has them for so much and more.
  bool are_enough() const {
    for (const auto& by_wire : pools_) {
      if (!by_wire[0].is_enough(false) || !by_wire[1].is_enough(true)) return false;
    }
    return true;
  }
  GpuBounds() = default;
  GpuBounds(const GpuBounds&) = delete;
  GpuBounds& operator=(const GpuBounds&) = delete;

 private:
  struct Pool {
    std::vector<bf16> gpu, host;
    double pairs = 0;

    bool is_enough(bool quantised) const { return pairs >= (1 << 17) && (!quantised || gpu.size() >= (1 << 15)); }
  };
  /// A group of activations that takes another scale, or a value that takes another code on its way back, weighs much in a few
  /// tokens.
  static double bound_of_one(const Case& c, Activation activation) {
    if (c.options.combine_wire != Wire::bf16) return 0.2;
    return activation == Activation::fp8 ? 8e-2 : 2e-2;
  }
  Pool pools_[2][2];  ///< by activation, then by the combine wire: bf16, or quantised
};

/// What a layer is refused with, or is used wrongly with.
inline std::string refusal_of(const Case& c, const std::function<void(LayerBed&)>& use = {}) {
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  try {
    LayerBed bed({{&source, &c}});
    if (use) use(bed);
  } catch (const InputError& error) {
    return error.what();
  }
  return "nothing was refused";
}

}  // namespace heddle::layer_test
