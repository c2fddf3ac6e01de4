// The fused layer and the ways mixed over one poisoned workspace, workers late everywhere: who claims which task, whose rows come
// first and who stalls is drawn anew in every call, and every call is compared with the chain alone.
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <thread>

#include "exchange_trip.hpp"
#include "layer_support.hpp"
#include "mega/options.hpp"

namespace heddle::layer_test {
namespace {

/// Layers over one workspace: what they need together, and what each of their calls must give.
struct Mix {
  std::vector<Case> cases;
  std::vector<std::unique_ptr<SyntheticLayer>> layers;
  std::vector<LayerSource> sources;
  ExchangeMemory memory;
  std::string configuration;

  void add(const Case& c) {
    cases.push_back(c);
    layers.push_back(std::make_unique<SyntheticLayer>(c.layer));
    sources.push_back(source_of(*layers.back(), c));
    const LayerWeights weights = LayerWeights::load(sources.back(), c.placement, 0);
    memory.include(exchange_memory(exchange_options(weights, c.options)));
    configuration += heddle::describe(weights, c.options);
  }
  int ranks() const { return cases[0].ranks(); }
};

/// Batches of a call, drawn alike on all ranks.
struct Call {
  std::size_t which = 0;
  Case c;
  Tokens tokens;
  std::vector<bf16> wanted;
};

Case small_case(std::uint64_t seed, int ranks, Way way) {
  Chance chance(seed);
  Case c = random_case(seed, ranks);
  c.layer.shape.hidden = 64 * chance.between(1, 5);
  c.layer.shape.intermediate = 64 * chance.between(1, 4);
  c.options.weight_at = WeightAt::activation;
  c.options.way = way;
  c.options.cap = chance.one_of({5, 12, 40});
  c.options.workers = chance.between(1, 3);
  c.options.block_rows = chance.one_of({8, 8, 16});
  c.options.ring = chance.one_of({RingSize::live, RingSize::live, RingSize::full});
  return c;
}

/// Two results have one sum, whichever comes first.
Case with_added_results(Case c) {
  c.layer.shape.topk = std::min(c.layer.shape.topk, 2);
  c.layer.shared_kind.reset();
  c.layer.shared_intermediate = 0;
  c.options.combine_wire = Wire::bf16;
  c.options.combine = Combine::add;
  return c;
}

Mix mixed_layers(std::uint64_t seed, int ranks) {
  Mix mix;
  for (std::uint64_t i = 0; i < 4; ++i) mix.add(small_case(seed + i, ranks, Way::mega));
  mix.add(with_added_results(small_case(seed + 4, ranks, Way::mega)));
  // Those that pull from each other's areas, and one that pushes into slots.
  for (const Way way : {Way::gather, Way::one_sided, Way::low_latency}) {
    mix.add(small_case(seed + 10 + static_cast<std::uint64_t>(way), ranks, way));
  }
  return mix;
}

std::vector<Call> draw_calls(const Mix& mix, std::uint64_t seed, int calls) {
  Chance chance(seed);
  std::vector<Call> drawn;
  for (int i = 0; i < calls; ++i) {
    Call call;
    // Mostly the fused layer, now and then another way in between.
    call.which = static_cast<std::size_t>(chance.one_in(3) ? chance.between(5, 7) : chance.between(0, 4));
    call.c = mix.cases[call.which];
    call.c.tokens = random_split(chance, mix.ranks(), call.c.options.cap);
    call.tokens = draw_tokens(call.c, chance.seed());
    Case alone = call.c;
    if (alone.options.way == Way::mega) alone.options.way = Way::low_latency;
    alone.options.combine = Combine::slots;
    call.wanted = run_layer(mix.sources[call.which], alone, call.tokens).outputs;
    drawn.push_back(std::move(call));
  }
  return drawn;
}

/// Workers of the layers that this thread creates are late before some verbs, asleep or out of turn.
std::function<void()> lateness(std::uint64_t seed) {
  return [random = std::make_shared<Random>(seed), guard = std::make_shared<std::mutex>()] {
    std::uint64_t drawn = 0;
    {
      const std::lock_guard lock(*guard);  // workers of a rank share the generator
      drawn = random->next() % 1000;
    }
    if (drawn < 4) std::this_thread::sleep_for(std::chrono::microseconds(20 + 25 * drawn));
    if (drawn >= 850) std::this_thread::yield();
  };
}

void run_calls(Group& group, const Mix& mix, const std::vector<Call>& calls, std::uint64_t seed) {
  const int rank = group.rank();
  Workspace workspace(group, mix.memory.heap_bytes(mix.ranks()), mix.configuration);
  poison_heap(workspace, mix.memory);
  set_verb_hook(lateness(seed + 1000 * static_cast<std::uint64_t>(rank)));
  std::vector<MoeLayer> layers;
  for (std::size_t i = 0; i < mix.cases.size(); ++i)
    layers.emplace_back(workspace, mix.memory, LayerWeights::load(mix.sources[i], mix.cases[i].placement, rank),
                        mix.cases[i].options);
  set_verb_hook({});
  for (std::size_t i = 0; i < calls.size() && !testing::Test::HasFailure(); ++i) {
    const Call& one = calls[i];
    const std::vector<bf16> have = call(one.c, layers[one.which], one.tokens, rank);
    EXPECT_EQ(different_bits(have, part_of(one.c, one.wanted, rank)), 0u)
        << "call " << i << " on rank " << rank << ": " << text_of(one.c);
  }
  workspace.close();
}

class MegaStress : public testing::TestWithParam<int> {};

TEST_P(MegaStress, LateWorkersAndOtherWaysInBetween) {
  const std::uint64_t seed = announced_seed();
  for (int round = 0; round < rounds(6) && !HasFailure(); ++round) {
    const std::uint64_t begin = seed + 100 * static_cast<std::uint64_t>(round);
    const Mix mix = mixed_layers(begin, GetParam());
    const std::vector<Call> calls = draw_calls(mix, begin, is_sanitized ? 25 : 60);
    run_ranks(GetParam(), {}, [&](Group& group) { run_calls(group, mix, calls, begin); });
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, MegaStress, testing::Values(1, 2, 3, 6));

}  // namespace
}  // namespace heddle::layer_test
