// One MoE layer on two ranks (threads of this program): 8 experts of bf16 weights, 2 a token, by the
// elastic way. Only public headers; see docs/ways.md for what the way does.
#include <cstdio>
#include <heddle/layer.hpp>
#include <thread>
#include <vector>

using namespace heddle;

constexpr int ranks = 2, experts = 8, topk = 2, hidden = 128, intermediate = 64, tokens = 4;

// A matrix [rows, cols] with `value` everywhere; the storage outlives the layer.
static WeightMatrix constant(std::vector<bf16>& storage, int rows, int cols, float value) {
  storage.assign(static_cast<std::size_t>(rows) * cols, to_bf16(value));
  return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(storage)), {}};
}

static void run_rank(Group& group) {
  LayerWeights weights;
  weights.shape = {hidden, intermediate, experts, topk, {}};
  weights.placement = Placement::contiguous(experts, ranks);
  std::vector<std::vector<bf16>> storage(3 * experts);
  for (const int e : weights.placement.experts_of(group.rank())) {
    weights.experts.push_back({constant(storage[3 * e], intermediate, hidden, 0.01f),
                               constant(storage[3 * e + 1], intermediate, hidden, 0.01f),
                               constant(storage[3 * e + 2], hidden, intermediate, 0.1f * static_cast<float>(e + 1))});
  }
  LayerOptions options;
  options.way = Way::elastic;
  options.cap = tokens;
  const ExchangeOptions exchange = exchange_options(weights, options);
  const ExchangeMemory memory = exchange_memory(exchange);
  Workspace workspace(group, memory.heap_bytes(ranks),
                      describe(weights, options));  // the same on all ranks, or an error that names the difference
  MoeLayer layer(workspace, memory, weights, options);

  const std::vector<bf16> input(tokens * hidden, to_bf16(1.0f));
  std::vector<bf16> output(tokens * hidden);
  std::vector<std::int32_t> ids;
  for (int t = 0; t < tokens; ++t) ids.insert(ids.end(), {t % experts, (t + 3 + group.rank()) % experts});
  const std::vector<float> choice_weights(tokens * topk, 0.5f);
  layer.forward({tokens, input.data(), ids.data(), choice_weights.data()}, {tokens, Phase::decode}, output.data());
  for (int t = 0; t < tokens; ++t) {
    std::printf("rank %d, token %d, experts %d and %d: %g\n", group.rank(), t, ids[2 * t], ids[2 * t + 1],
                to_float(output[t * hidden]));
  }
  workspace.close();
}

int main() {
  auto group = create_thread_group(ranks);
  std::vector<std::thread> threads;
  for (auto& rank : group) threads.emplace_back([&rank] { run_rank(*rank); });
  for (auto& thread : threads) thread.join();
}
