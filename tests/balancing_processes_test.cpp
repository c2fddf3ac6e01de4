// Ranks as processes: weights go from one to another through the heap, and the bits are those of threads.
#include "balancing_layer_support.hpp"
#include "processes.hpp"

namespace heddle::layer_test {
namespace {

TEST(BalancingProcesses, SwitchInTheMiddleOfCalls) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(14)) && !::testing::Test::HasFailure(); ++i) {
    const int ranks = 2 + static_cast<int>((seed + i) % 3);
    const BalancedCase b = balanced_case(seed + i, host_routes[(seed + i) % std::size(host_routes)], ranks);
    SCOPED_TRACE(text_of(b.c));
    SyntheticLayer layer(b.c.layer);
    const LayerSource source = source_of(layer, b.c);
    std::mt19937_64 random(seed + i);
    const std::vector<ReplicaMap> maps{b.first, balancing_test::random_map(random, b.c.layer.shape.experts, ranks, b.places)};
    const Tokens tokens = draw_tokens(b.c, seed);
    std::vector<std::vector<bf16>> wanted;
    for (const ReplicaMap& map : maps) wanted.push_back(run_physical(source, b.c, tokens, map, CopyRule::levelled).outputs);
    const std::string name = "balancing." + std::to_string(getpid()) + "." + std::to_string(i);
    const std::vector<int> statuses = run_processes(ranks, [&](int rank) {
      const auto group = join_process_group(name, rank, ranks, {std::chrono::milliseconds(60000)});
      OneBalanced one(*group, source, b, {});
      one.layer->move_to(maps[1]);
      for (int call = 0; call < 4; ++call) {
        const auto force = static_cast<std::size_t>(one.layer->report().switches);
        EXPECT_EQ(different_bits(one.call(b.c, tokens), part_of(b.c, wanted[force], rank)), 0u)
            << "call " << call << " of rank " << rank;
      }
      EXPECT_EQ(one.layer->report().switches, 1);
      one.close();
    });
    EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
  }
}

}  // namespace
}  // namespace heddle::layer_test
