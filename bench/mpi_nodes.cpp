// Round trips of elastic over the nodes of an MPI launch, direct and hybrid, as one JSON object on the first rank's output:
//   mpirun .. mpi_nodes_bench HIDDEN EXPERTS TOPK TOKENS ROUNDS
// Experts give zeros at once: what is timed is the exchange. A round trip is that of the slowest rank.
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "heddle/error.hpp"
#include "heddle/exchange.hpp"
#include "heddle/mpi.hpp"

namespace heddle {
namespace {

struct Shape {
  int hidden, experts, topk, tokens, rounds;
};

struct Batch {
  std::vector<bf16> hidden;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Batch draw(const Shape& shape, int rank) {
  std::mt19937 random(static_cast<unsigned>(rank + 1));
  Batch batch{std::vector<bf16>(static_cast<std::size_t>(shape.tokens * shape.hidden), to_bf16(0.5f)), {}, {}};
  std::vector<std::int32_t> experts(static_cast<std::size_t>(shape.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (int token = 0; token < shape.tokens; ++token) {
    std::shuffle(experts.begin(), experts.end(), random);
    batch.ids.insert(batch.ids.end(), experts.begin(), experts.begin() + shape.topk);
  }
  batch.weights.assign(batch.ids.size(), 1.0f / static_cast<float>(shape.topk));
  return batch;
}

std::vector<double> numbers_of(Group& group, double mine) {
  std::vector<double> all;
  for (const std::string& text : group.exchange(std::to_string(mine), "times")) all.push_back(std::stod(text));
  return all;
}

double sum_over_ranks(Group& group, std::uint64_t mine) {
  const auto all = numbers_of(group, static_cast<double>(mine));
  return std::accumulate(all.begin(), all.end(), 0.0);
}

nlohmann::ordered_json measure(Group& group, const Shape& shape, const ExchangeOptions& options) {
  const ExchangeMemory memory = exchange_memory(options);
  Workspace workspace(group, memory.heap_bytes(group.ranks()), describe(options));
  const auto exchange = create_exchange(workspace, options, memory);
  const Batch batch = draw(shape, group.rank());
  std::vector<bf16> out(batch.hidden.size()), results;
  CombineOutput output;
  output.out = out.data();
  std::vector<double> times;
  for (int round = 0; round < shape.rounds + 2; ++round) {
    exchange->take_traffic();
    group.barrier("start of a round trip");
    const auto since = std::chrono::steady_clock::now();
    const Arrived arrived = exchange->dispatch({shape.tokens, batch.hidden.data(), batch.ids.data(), batch.weights.data(), {}},
                                               {shape.tokens, Phase::decode});
    results.resize(static_cast<std::size_t>(arrived.room) * static_cast<std::size_t>(shape.hidden));
    exchange->combine(results.data(), output);
    const auto all = numbers_of(group, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - since).count());
    if (round >= 2) times.push_back(*std::max_element(all.begin(), all.end()));
  }
  const ExchangeTraffic traffic = exchange->take_traffic();
  workspace.close();
  std::vector<double> sorted = times;
  std::sort(sorted.begin(), sorted.end());
  return {{"mode", options.mode == NodeMode::hybrid ? "hybrid" : "direct"},
          {"wire", options.wire == Wire::fp8 ? "fp8" : "bf16"},
          {"median_us", sorted[sorted.size() / 2]},
          {"between_rows", sum_over_ranks(group, traffic.between_rows)},
          {"between_bytes", sum_over_ranks(group, traffic.between_bytes)},
          {"inside_bytes", sum_over_ranks(group, traffic.remote_bytes - traffic.between_bytes)},
          {"samples_us", times}};
}

void run(const Shape& shape) {
  const auto group = join_mpi({{std::chrono::seconds(60)}, {}});
  nlohmann::ordered_json json{{"benchmark", "nodes"},   {"ranks", group->ranks()},        {"nodes", group->nodes()},
                              {"hidden", shape.hidden}, {"experts", shape.experts},       {"topk", shape.topk},
                              {"tokens", shape.tokens}, {"rows", nlohmann::json::array()}};
  ExchangeOptions options;
  options.way = Way::elastic;
  options.hidden = shape.hidden;
  options.topk = shape.topk;
  options.cap = shape.tokens;
  options.placement = Placement::contiguous(shape.experts, group->ranks());
  options.arrived = ArrivedLayout::routed;
  for (const Wire wire : {Wire::bf16, Wire::fp8}) {
    for (const NodeMode mode : {NodeMode::direct, NodeMode::hybrid, NodeMode::direct, NodeMode::hybrid}) {
      options.wire = wire;
      options.mode = mode;
      json["rows"].push_back(measure(*group, shape, options));
    }
  }
  if (group->rank() == 0) std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace heddle

int main(int count, char** words) {
  if (count != 6) return 2;
  std::signal(SIGPIPE, SIG_IGN);
  const heddle::Shape shape{std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]), std::atoi(words[4]),
                            std::atoi(words[5])};
  int level = 0;
  MPI_Init_thread(&count, &words, MPI_THREAD_FUNNELED, &level);
  try {
    heddle::run(shape);
  } catch (const heddle::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(static_cast<int>(error.kind()));
  }
  MPI_Finalize();
  return 0;
}
