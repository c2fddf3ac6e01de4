// Ranks on two nodes, as threads of one process: what a program on several machines does, to try it on one. Rows cross to a node
// once and are forwarded there (NodeMode::hybrid); the result is that of one node, bit for bit.
#include <cstdio>
#include <thread>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/exchange.hpp"
#include "heddle/nodes.hpp"

namespace {

constexpr int nodes = 2, ranks_a_node = 2, ranks = nodes * ranks_a_node;
constexpr int hidden = 64, topk = 3, tokens = 4, experts = 8;

heddle::ExchangeOptions options_of(heddle::NodeMode mode) {
  heddle::ExchangeOptions options;
  options.way = heddle::Way::elastic;
  options.hidden = hidden;
  options.topk = topk;
  options.cap = tokens;
  options.placement = heddle::Placement::contiguous(experts, ranks);
  options.wire = heddle::Wire::bf16;
  options.arrived = heddle::ArrivedLayout::routed;
  options.mode = mode;
  return options;
}

/// A round trip whose experts give every row back times its weights. Returns the outputs; `moved` is what this rank sent.
std::vector<heddle::bf16> round_trip(heddle::Group& group, heddle::NodeMode mode, heddle::ExchangeTraffic& moved) {
  const heddle::ExchangeOptions options = options_of(mode);
  const heddle::ExchangeMemory memory = heddle::exchange_memory(options);
  heddle::Workspace workspace(group, memory.heap_bytes(ranks), heddle::describe(options));
  const auto exchange = heddle::create_exchange(workspace, options, memory);
  std::vector<heddle::bf16> rows(tokens * hidden, heddle::to_bf16(static_cast<float>(group.rank() + 1)));
  // One expert of this rank, and one of either rank of the other node.
  const int elsewhere = group.rank() < ranks_a_node ? experts / 2 : 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  for (int i = 0; i < tokens; ++i) {
    ids.insert(ids.end(), {2 * group.rank(), elsewhere, elsewhere + 2});
    weights.insert(weights.end(), {0.5f, 0.25f, 0.25f});
  }
  const heddle::Arrived arrived =
      exchange->dispatch({tokens, rows.data(), ids.data(), weights.data(), {}}, {tokens, heddle::Phase::decode});
  std::vector<heddle::bf16> results(static_cast<std::size_t>(arrived.room) * hidden);
  for (int row = 0; row < arrived.room; ++row) {
    float factor = 0;
    for (int j = 0; j < topk; ++j) factor += arrived.local_ids[row * topk + j] >= 0 ? arrived.weights[row * topk + j] : 0;
    const auto* values = reinterpret_cast<const heddle::bf16*>(arrived.rows + static_cast<std::size_t>(row) * arrived.row_stride);
    for (int i = 0; factor > 0 && i < hidden; ++i)
      results[static_cast<std::size_t>(row) * hidden + static_cast<std::size_t>(i)] =
          heddle::to_bf16(factor * heddle::to_float(values[i]));
  }
  std::vector<heddle::bf16> out(tokens * hidden);
  heddle::CombineOutput output;
  output.out = out.data();
  exchange->combine(results.data(), output);
  moved = exchange->take_traffic();
  workspace.close();
  return out;
}

}  // namespace

int main() {
  int wrong = 0;
  for (const heddle::NodeMode mode : {heddle::NodeMode::direct, heddle::NodeMode::hybrid}) {
    auto group = heddle::create_virtual_nodes(nodes, ranks_a_node);
    std::vector<std::vector<heddle::bf16>> outputs(ranks);
    std::vector<heddle::ExchangeTraffic> moved(ranks);
    {
      std::vector<std::jthread> threads;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
          try {
            outputs[rank] = round_trip(*group[rank], mode, moved[rank]);
          } catch (const heddle::Error& error) {
            std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
          }
        });
      }
    }
    unsigned long long between = 0, inside = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      between += moved[rank].between_rows;
      inside += moved[rank].remote_rows - moved[rank].between_rows;
      // The experts give back half of the row and two quarters.
      wrong += outputs[rank].empty() || heddle::to_float(outputs[rank].front()) != static_cast<float>(rank + 1) ? 1 : 0;
    }
    std::printf("%s: %llu rows to the other node, %llu inside\n", mode == heddle::NodeMode::direct ? "direct" : "hybrid", between,
                inside);
  }
  std::printf("%s\n", wrong == 0 ? "all tokens came home" : "some tokens did not come home as they should");
  return wrong == 0 ? 0 : 1;
}
