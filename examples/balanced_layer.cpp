// Experts with copies that follow the load: four ranks (threads of this program), eight more copies than experts. Some experts are
// busy; the layer counts, copies weights between calls and switches without a stop. Only public headers; docs/balancing.md says
// how.
#include <algorithm>
#include <cstdio>
#include <heddle/balancing.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace heddle;

constexpr int ranks = 4, experts = 16, extra = 8, topk = 2, hidden = 128, intermediate = 64, tokens = 64, calls = 12;

static std::vector<bf16> random_values(std::mt19937& random, std::size_t count, float size) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<bf16> values(count);
  for (bf16& value : values) value = to_bf16(normal(random));
  return values;
}

static WeightMatrix matrix_of(const std::vector<bf16>& values, int rows, int cols) {
  return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(values)), {}};
}

static void run_rank(Group& group, const LayerSource& source, const ReplicaMap& first, const LayerOptions& options,
                     const ContextPlan& plan) {
  Workspace workspace(group, plan.heap_bytes, plan.configuration);
  BalancingOptions balancing;
  balancing.every = 4;             // calls between looks at the loads
  balancing.copy_bytes = 1 << 16;  // that a rank copies after a call at most
  BalancedLayer layer(workspace, plan.memory, source, first, options, balancing);

  std::mt19937 random(static_cast<unsigned>(group.rank()));
  const std::vector<bf16> input = random_values(random, std::size_t{tokens} * hidden, 1.0f);
  std::vector<bf16> output(input.size());
  for (int call = 0; call < calls; ++call) {
    const auto seed = static_cast<std::uint64_t>(call * ranks + group.rank());
    const Routing routing = draw_routing(zipf_popularity(experts, 1.5, 7), {tokens, topk, seed, 0.0, 1.0f});
    layer.forward({tokens, input.data(), routing.ids.data(), routing.weights.data()}, {tokens, Phase::decode}, output.data());

    int most = 0;  // what the others computed, only to print it
    for (const std::string& rows : group.exchange(std::to_string(layer.layer_report().rows_real), "rows"))
      most = std::max(most, std::stoi(rows));
    if (group.rank() == 0) {
      std::printf("call %2d: the busiest rank computed %3d rows, %d are even%s\n", call, most, tokens * topk,
                  layer.is_moving() ? "; weights are on their way" : "");
    }
  }
  const BalancingReport& report = layer.report();
  if (group.rank() == 0) {
    std::printf("%lld switches, %lld experts came to rank 0; max/mean as the last look found it %.2f, and as it would be %.2f\n",
                static_cast<long long>(report.switches), static_cast<long long>(report.moved), report.imbalance, report.expected);
  }
  layer.close();
  workspace.close();
}

int main() {
  std::mt19937 random(1);
  std::vector<std::vector<bf16>> values;
  for (int i = 0; i < 3 * experts; ++i) values.push_back(random_values(random, std::size_t{hidden} * intermediate, 0.1f));

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
  const ContextLayer layer{&physical, first.placement(), options};
  const ContextPlan plan = plan_context({&layer, 1});

  auto group = create_thread_group(ranks);
  std::vector<std::thread> threads;
  for (auto& rank : group) threads.emplace_back([&] { run_rank(*rank, source, first, options, plan); });
  for (auto& thread : threads) thread.join();
}
