// A layer that chooses its way call by call: two ranks (threads of this program), the heap's size known before anything is made,
// the router inside, and a batch of more tokens than the cap. Only public headers; docs/choosing.md says how it chooses.
#include <cstdio>
#include <heddle/layer.hpp>
#include <random>
#include <thread>
#include <vector>

using namespace heddle;

constexpr int ranks = 2, experts = 8, topk = 2, hidden = 128, intermediate = 64, cap = 16;

static std::vector<bf16> random_values(std::mt19937& random, std::size_t count, float size) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<bf16> values(count);
  for (bf16& value : values) value = to_bf16(normal(random));
  return values;
}

static WeightMatrix matrix_of(const std::vector<bf16>& values, int rows, int cols) {
  return {WeightKind::bf16, rows, cols, std::as_bytes(std::span(values)), {}};
}

// Times as `heddle tune` measures and writes them; TuningTable::read takes its file. These are made up.
static std::shared_ptr<const TuningTable> times() {
  auto table = std::make_shared<TuningTable>();
  const TuningKey key{"this machine", hidden, intermediate, experts, topk, ranks, WeightKind::bf16, Activation::bf16};
  table->add({key,
              "made up",
              {{1, {{Way::gather, 20.0}, {Way::low_latency, 25.0}, {Way::normal, 60.0}}},
               {16, {{Way::gather, 90.0}, {Way::low_latency, 80.0}, {Way::normal, 70.0}}}}});
  return table;
}

static void run_rank(Group& group, const LayerSource& source, const LayerRouter& router, const LayerOptions& options,
                     const ContextPlan& plan) {
  LayerWeights weights = LayerWeights::load(source, Placement::contiguous(experts, ranks), group.rank());
  weights.router = router;
  // Ranks whose tables differ are refused here, with the name of what differs.
  Workspace workspace(group, plan.heap_bytes, plan.configuration);
  MoeLayer layer(workspace, plan.memory, std::move(weights), options);

  std::mt19937 random(static_cast<unsigned>(group.rank()));
  for (const int most : {1, 4, 12, 40}) {
    const int tokens = group.rank() == 0 ? most : most / 2;  // the step is the same on all ranks, the batches are not
    const Step step{most, Phase::decode};
    const std::vector<bf16> input = random_values(random, static_cast<std::size_t>(tokens) * hidden, 1.0f);
    std::vector<bf16> output(input.size());
    if (group.rank() == 0) std::printf("%s", layer.explain(step).text().c_str());
    layer.forward(tokens, input.data(), step, output.data());
    const LayerReport& report = layer.report();
    std::printf("rank %d: %d tokens by %s in %d passes\n", group.rank(), tokens, name(report.way).data(), report.passes);
    group.barrier("end of a call");  // only so that lines do not mix
  }
  workspace.close();
}

int main() {
  std::mt19937 random(1);
  std::vector<std::vector<bf16>> values;
  for (int i = 0; i < 3 * experts; ++i) values.push_back(random_values(random, std::size_t{hidden} * intermediate, 0.1f));
  std::vector<float> scores;
  for (const bf16 value : random_values(random, std::size_t{experts} * hidden, 0.1f)) scores.push_back(to_float(value));

  LayerSource source;
  source.shape = {hidden, intermediate, experts, topk, {}};
  source.expert = [&](int e) {
    const auto* of_expert = &values[3 * static_cast<std::size_t>(e)];
    return ExpertWeights{matrix_of(of_expert[0], intermediate, hidden), matrix_of(of_expert[1], intermediate, hidden),
                         matrix_of(of_expert[2], hidden, intermediate)};
  };
  LayerRouter router;
  router.weights = scores;
  router.options.topk = topk;

  LayerOptions options;
  options.way = Way::automatic;
  options.cap = cap;
  options.overflow = Overflow::split;
  options.automatic.table = times();
  options.automatic.machine = "this machine";
  const ContextLayer layer{&source, Placement::contiguous(experts, ranks), options};
  const ContextPlan plan = plan_context({&layer, 1});
  std::printf("every rank's part of the workspace will take %zu bytes\n", plan.heap_bytes);

  auto group = create_thread_group(ranks);
  std::vector<std::thread> threads;
  for (auto& rank : group) threads.emplace_back([&] { run_rank(*rank, source, router, options, plan); });
  for (auto& thread : threads) thread.join();
}
