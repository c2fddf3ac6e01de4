// One MoE layer on four ranks (threads of this program), twice: as a chain of dispatch, experts and combine (low_latency), and as
// the fused layer (mega), in which all of that is under way at once. Both give the same bits, for any batch. Only public headers;
// docs/protocols/mega.md says how the fused layer works.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <heddle/layer.hpp>
#include <random>
#include <thread>
#include <vector>

using namespace heddle;

constexpr int ranks = 4, experts = 16, topk = 4, hidden = 512, intermediate = 256, tokens = 64, calls = 5;

static std::vector<bf16> random_values(std::mt19937& random, std::size_t count, float size) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<bf16> values(count);
  for (bf16& value : values) value = to_bf16(normal(random));
  return values;
}

static WeightMatrix matrix_of(const std::vector<bf16>& values, int rows, int cols) {
  return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(values)), {}};
}

// A rank's tokens and what the router chose for them.
struct Tokens {
  std::vector<bf16> hidden_states;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

  explicit Tokens(std::mt19937& random) : hidden_states(random_values(random, tokens * hidden, 1.0f)) {
    for (int token = 0; token < tokens; ++token) {
      const int first = static_cast<int>(random() % experts);
      for (int choice = 0; choice < topk; ++choice) ids.push_back((first + choice * choice) % experts);
    }
    weights.assign(tokens * topk, 1.0f / topk);
  }
};

// Calls the layer on one rank; rank 0 says how long the last call took and what the ranks share.
static std::vector<bf16> run_rank(Group& group, const LayerSource& source, Way way, const Tokens& mine) {
  const LayerWeights weights = LayerWeights::load(source, Placement::contiguous(experts, ranks), group.rank());
  LayerOptions options;
  options.way = way;
  options.cap = tokens;
  const ExchangeMemory memory = exchange_memory(exchange_options(weights, options));
  Workspace workspace(group, memory.heap_bytes(ranks), describe(weights, options));
  MoeLayer layer(workspace, memory, weights, options);
  std::vector<bf16> out(tokens * hidden);
  double milliseconds = 0;
  for (int call = 0; call < calls; ++call) {
    const auto begin = std::chrono::steady_clock::now();
    layer.forward({tokens, mine.hidden_states.data(), mine.ids.data(), mine.weights.data()}, {tokens, Phase::prefill}, out.data());
    milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
  if (group.rank() == 0) {
    std::printf("%-12s %6.2f ms a call, %5.2f MB a rank\n", way == Way::mega ? "mega" : "low_latency", milliseconds,
                static_cast<double>(memory.heap_bytes(ranks)) * 1e-6);
  }
  workspace.close();
  return out;
}

static std::vector<std::vector<bf16>> run(const LayerSource& source, Way way, const std::vector<Tokens>& batch) {
  auto group = create_thread_group(ranks);
  std::vector<std::vector<bf16>> outputs(ranks);
  std::vector<std::thread> threads;
  for (auto& rank : group) {
    const auto r = static_cast<std::size_t>(rank->rank());
    threads.emplace_back([&, r] { outputs[r] = run_rank(*group[r], source, way, batch[r]); });
  }
  for (auto& thread : threads) thread.join();
  return outputs;
}

int main() {
  std::mt19937 random(1);
  std::vector<std::vector<bf16>> storage;  // of all experts: gate, up, down
  for (int i = 0; i < 3 * experts; ++i) storage.push_back(random_values(random, hidden * intermediate, 0.05f));
  const LayerSource source{.shape = {hidden, intermediate, experts, topk, {}},
                           .kind = WeightKind::bf16,
                           .expert =
                               [&](int e) {
                                 const std::vector<bf16>* of = &storage[static_cast<std::size_t>(3 * e)];
                                 return ExpertWeights{matrix_of(of[0], intermediate, hidden),
                                                      matrix_of(of[1], intermediate, hidden),
                                                      matrix_of(of[2], hidden, intermediate)};
                               },
                           .shared = {}};
  std::vector<Tokens> batch;
  for (int rank = 0; rank < ranks; ++rank) batch.emplace_back(random);
  const auto chain = run(source, Way::low_latency, batch);
  const auto fused = run(source, Way::mega, batch);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (std::memcmp(chain[rank].data(), fused[rank].data(), chain[rank].size() * sizeof(bf16)) != 0) {
      std::printf("rank %zu: the outputs differ\n", rank);
      return 1;
    }
  }
  std::printf("the same bits on every rank\n");
}
