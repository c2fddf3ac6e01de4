// Copies of experts on GPUs: the kernel's choices are the host's, captured ones follow later placements, and a layer whose experts
// are replaced between replays of a graph keeps its bits.
#include "balancing_support.hpp"
#include "gpu/layer_bed.hpp"
#include "heddle/device_balancing.hpp"

namespace heddle::layer_test {
namespace {

constexpr int copies_cap = 70, copies_topk = 5;

/// Inputs of a GPU's ranks, ids alone.
struct IdsBed {
  std::vector<Routing> routings;
  std::vector<Buffer<int>> tokens;
  std::vector<Buffer<std::int32_t>> ids;

  IdsBed(std::mt19937_64& random, int ranks, int experts) {
    for (int rank = 0; rank < ranks; ++rank) {
      const int count = static_cast<int>(random() % (copies_cap + 1));
      routings.push_back(draw_routing(zipf_popularity(experts, 0.9, random()), {count, copies_topk, random(), 0.1, 1.0f}));
      tokens.emplace_back(0, 1);
      tokens.back().write({count});
      ids.emplace_back(0, std::size_t{copies_cap} * copies_topk);
      ids.back().poison();
      if (count > 0) ids.back().write(routings.back().ids);
    }
    check(cudaDeviceSynchronize(), "copies of ids");
  }
  std::vector<DeviceInput> inputs() {
    std::vector<DeviceInput> all;
    for (std::size_t i = 0; i < tokens.size(); ++i) all.push_back({tokens[i].data(), nullptr, ids[i].data(), nullptr, {}});
    return all;
  }
  /// Of ranks [first, ...), as the host chooses.
  void expect_chosen(const std::vector<DeviceInput>& chosen, const ReplicaMap& map, CopyRule rule, int first,
                     std::vector<std::int64_t>& counts) const {
    check(cudaDeviceSynchronize(), "chosen copies");
    for (std::size_t i = 0; i < routings.size(); ++i) {
      std::vector<std::int32_t> wanted(routings[i].ids.size()), got(wanted.size());
      choose_copies(map, rule, first + static_cast<int>(i), routings[i].ids, wanted, counts);
      if (got.empty()) continue;
      check(cudaMemcpy(got.data(), chosen[i].ids, got.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost), "chosen copies");
      EXPECT_EQ(got, wanted) << "rank " << first + static_cast<int>(i);
    }
  }
};

TEST(CopiesGpu, AreTheHostsCapturedToo) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(balancing_test::announced_seed());
  const cuda::DeviceScope scope(0);
  for (const CopyRule rule : {CopyRule::levelled, CopyRule::turns}) {
    for (const int experts : {5, 64, 384}) {
      const int ranks = 8, places = (experts + ranks - 1) / ranks + 4, first = 3, locals = 4;
      const ReplicaMap map = balancing_test::random_map(random, experts, ranks, places);
      const ReplicaMap next = balancing_test::random_map(random, experts, ranks, places);
      IdsBed bed(random, locals, experts);
      DeviceCopies copies(0, first, locals, map, rule, copies_topk, copies_cap);
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      std::vector<std::int64_t> counts(static_cast<std::size_t>(experts), 0);
      bed.expect_chosen(copies.choose(bed.inputs(), stream), map, rule, first, counts);
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      const std::vector<DeviceInput> chosen = copies.choose(bed.inputs(), stream);
      cudaGraph_t graph = nullptr;
      check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
      cudaGraphExec_t ready = nullptr;
      check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
      copies.update(next, stream);
      check(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
      bed.expect_chosen(chosen, next, rule, first, counts);
      EXPECT_EQ(copies.take_counts(stream), counts);
      EXPECT_EQ(copies.take_counts(stream), std::vector<std::int64_t>(counts.size(), 0));
      cudaGraphExecDestroy(ready);
      cudaGraphDestroy(graph);
      cudaStreamDestroy(stream);
      if (HasFailure()) return;
    }
  }
  std::vector<std::vector<int>> many(1);
  for (int expert = 0; expert < 600; ++expert) many[0].push_back(expert);
  EXPECT_THROW(DeviceCopies(0, 0, 1, ReplicaMap::from_ranks(many, 600), CopyRule::turns, 1, 1), InputError);
}

/// Slots have the bits of a layer without copies, under a first placement and, in the same graph, under a second one.
TEST(BalancingGpu, ExpertsAreReplacedBetweenReplays) {
  SKIP_WITHOUT_GPU();
  std::mt19937_64 random(balancing_test::announced_seed());
  for (const Route& route : slot_routes) {
    for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::fp8_block, WeightKind::bf16}) {
      Case c = plain_case(4, kind);
      c.take(route);
      SCOPED_TRACE(text_of(c));
      SyntheticLayer layer(c.layer);
      const LayerSource source = source_of(layer, c);
      const Tokens tokens = draw_tokens(c, 5);
      LayerBed plain({{&source, &c}});
      plain.load(c, tokens);
      const std::vector<bf16> wanted = plain.call(c);
      const ReplicaMap maps[] = {balancing_test::random_map(random, c.layer.shape.experts, 4, 5),
                                 balancing_test::random_map(random, c.layer.shape.experts, 4, 5)};
      const LayerSource physical = physical_source(source, maps[0]);
      Case with_copies = c;
      with_copies.layer.shape.experts = maps[0].physical();
      with_copies.placement = maps[0].placement();
      LayerBed bed({{&physical, &with_copies}});
      const LayerGraphs graphs = bed.capture(step_of(c));
      for (const ReplicaMap& map : maps) {
        for (std::size_t gpu = 0; gpu < bed.workspace().gpus(); ++gpu) {
          const cuda::DeviceScope scope(bed.workspace().device(gpu));
          for (int local = 0; local < bed.workspace().ranks_on(gpu); ++local) {
            const auto own = map.experts_of(bed.workspace().first_rank(gpu) + local);
            for (int place = 0; place < static_cast<int>(own.size()); ++place)
              bed.layer(0, gpu).update_expert(local, place, source.expert(own[static_cast<std::size_t>(place)]), nullptr);
          }
        }
        Tokens chosen = tokens;
        chosen.routing = choose_copies(map, CopyRule::levelled, tokens.routing, c.tokens);
        bed.load(with_copies, chosen);
        EXPECT_EQ(different_bits(bed.replay(graphs, with_copies), wanted), 0u);
      }
      EXPECT_THROW(bed.layer(0, 0).update_expert(0, 5, source.expert(0), nullptr), InputError);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace heddle::layer_test
