// A layer over three nodes, of which one goes away in the middle of the work: virtual nodes, as threads of one process. The others
// agree on who is left, take over its experts and run the step again. On several machines the group comes from join_nodes or
// join_mpi, with a store that all of them reach (open_directory_store); the rest is the same. See docs/recovery.md.
#include <atomic>
#include <cstdio>
#include <heddle/nodes.hpp>
#include <heddle/recovery.hpp>
#include <string>
#include <thread>
#include <vector>

using namespace heddle;

constexpr int nodes = 3, ranks_a_node = 2, ranks = nodes * ranks_a_node, lost_node = 2;
constexpr int experts = 12, topk = 2, hidden = 128, intermediate = 64, tokens = 4;
constexpr std::uint32_t steps = 20, lost_at = 5;

// Every rank can make every expert, as it could read it from a checkpoint.
struct Experts {
  std::vector<std::vector<bf16>> storage{3 * experts};
  WeightMatrix constant(int number, int rows, int cols, float value) {
    auto& values = storage[static_cast<std::size_t>(number)];
    values.assign(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols), to_bf16(value));
    return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(values)), {}};
  }
  ExpertWeights make(int e) {
    return {constant(3 * e, intermediate, hidden, 0.01f), constant(3 * e + 1, intermediate, hidden, 0.01f),
            constant(3 * e + 2, hidden, intermediate, 0.1f * static_cast<float>(e + 1))};
  }
};

static void run_rank(Group& group) {
  Experts weights;
  LayerSource source;
  source.shape = {hidden, intermediate, experts, topk, {}};
  source.expert = [&](int e) { return weights.make(e); };
  LayerOptions options;
  options.way = Way::elastic;
  options.mode = NodeMode::hybrid;
  options.cap = tokens;
  RecoveryOptions recovery;
  recovery.grace = std::chrono::milliseconds(500);
  RecoveringLayers layers(group, {{&source, Placement::contiguous(experts, ranks), options}}, recovery);
  group.set_deadline(std::chrono::milliseconds(500));  // how long a silent rank is waited for

  const std::vector<bf16> input(tokens * hidden, to_bf16(1.0f));
  std::vector<bf16> output(tokens * hidden);
  std::vector<std::int32_t> ids;
  for (int t = 0; t < tokens; ++t) ids.insert(ids.end(), {t % experts, (t + 7) % experts});
  const std::vector<float> choice_weights(tokens * topk, 0.5f);
  while (layers.steps() < steps) {
    if (group.rank() / ranks_a_node == lost_node && layers.steps() == lost_at) return;  // it never says why
    layers.forward({tokens, input.data(), ids.data(), choice_weights.data()}, {tokens, Phase::decode}, output.data());
  }
  std::string live;
  for (int rank = 0; rank < ranks; ++rank)
    live += layers.members().live[static_cast<std::size_t>(rank)] ? std::to_string(rank) : "-";
  for (const Interruption& one : layers.interruptions()) {
    std::printf("rank %d: ranks %s from step %u on, %d experts moved here, token 0 is %g (%s)\n", group.rank(), live.c_str(),
                one.step, one.experts_moved, to_float(output[0]), one.reason.c_str());
  }
}

int main() {
  const auto group = create_virtual_nodes(nodes, ranks_a_node, {std::chrono::milliseconds(10000)});
  std::atomic<int> failed = 0;
  std::vector<std::jthread> threads;
  for (const auto& rank : group) {
    threads.emplace_back([&rank, &failed] {
      try {
        run_rank(*rank);
      } catch (const Error& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank->rank(), error.what());
        failed = 1;
      }
    });
  }
  threads.clear();
  return failed;
}
