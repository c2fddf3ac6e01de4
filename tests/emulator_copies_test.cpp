// The kernel that chooses copies of experts, run thread by thread on the host: the choices of the host's, id by id.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "balancing_support.hpp"
#include "emulator/device.hpp"

#undef __shared__
#define __shared__ static
inline unsigned __match_any_sync(unsigned, unsigned value) {
  const std::uint64_t* brought = heddle::emulator::exchange(value, 32);
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= static_cast<unsigned>(brought[lane] == value ? 1 : 0) << lane;
  return same;
}
inline void atomicAdd(int* to, int value) { *to += value; }
#include "balancing/copies_kernel.cuh"

namespace heddle::copies_kernel {
namespace {

/// A map as the device has it.
struct Tables {
  std::vector<int> ranks_of, several{0};
  CopiesTable view;
  explicit Tables(const ReplicaMap& map) {
    for (const int copy : map.copies()) ranks_of.push_back(map.placement().rank_of(copy));
    for (int expert = 0; expert < map.experts(); ++expert) {
      if (map.copies_of(expert).size() > 1) several.push_back(expert);
    }
    several[0] = static_cast<int>(several.size()) - 1;
    view = {map.experts(), map.physical(), map.ranks(), map.begins().data(), map.copies().data(), ranks_of.data(), several.data()};
  }
};

TEST(EmulatorCopies, AreTheHostsChoices) {
  std::mt19937_64 random(balancing_test::announced_seed());
  for (int round = 0; round < 30; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 9), places = 1 + static_cast<int>(random() % 8);
    const int experts = 1 + static_cast<int>(random() % static_cast<unsigned>(ranks * places));
    const int topk = 1 + static_cast<int>(random() % static_cast<unsigned>(std::min(6, experts)));
    const ReplicaMap map = balancing_test::random_map(random, experts, ranks, places);
    const Tables tables(map);
    const int tokens = static_cast<int>(random() % 120), most = tokens + static_cast<int>(random() % 3);
    Routing routing = draw_routing(zipf_popularity(experts, 0.8, random()), {most, topk, random(), 0.1, 1.0f});
    const auto real = static_cast<std::size_t>(tokens * topk);
    std::vector<std::int32_t> wanted(real), chosen(routing.ids.size(), -7);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(experts), 0);
    std::vector<unsigned long long> counted(counts.size(), 5);
    CopiesCall call;
    call.table = tables.view;
    call.rule = round % 3 == 0 ? CopyRule::turns : CopyRule::levelled;
    call.source = static_cast<int>(random() % 12);
    call.ids = routing.ids.data();
    call.tokens = &tokens;
    call.most_tokens = most;
    call.topk = topk;
    call.chosen = chosen.data();
    call.counts = counted.data();
    choose_copies(map, call.rule, call.source, std::span(routing.ids).first(real), wanted, counts);
    emulator::launch({1, threads, static_cast<unsigned>(random())}, [&] { choose(call); });
    for (std::size_t i = 0; i < chosen.size(); ++i)
      ASSERT_EQ(chosen[i], i < real ? wanted[i] : -7) << "pair " << i << ", round " << round;
    for (std::size_t e = 0; e < counts.size(); ++e) EXPECT_EQ(counted[e], static_cast<unsigned long long>(counts[e]) + 5);
  }
}

TEST(EmulatorCopies, BadIdsAreLeftForTheDispatchToRefuse) {
  const ReplicaMap map = ReplicaMap::from_ranks({{0, 1}, {0, 2}}, 3);
  const Tables tables(map);
  const std::vector<std::int32_t> ids{0, 0, 3, 1, -2, 2, -1, -1};
  std::vector<std::int32_t> chosen(ids.size());
  const int tokens = 4;
  CopiesCall call;
  call.table = tables.view;
  call.ids = ids.data();
  call.tokens = &tokens;
  call.most_tokens = 4;
  call.topk = 2;
  call.chosen = chosen.data();
  emulator::launch({1, threads, 1}, [&] { choose(call); });
  EXPECT_EQ(chosen, (std::vector<std::int32_t>{0, 4, 4, 1, 4, 3, -1, -1})) << "4 is no physical expert";
}

}  // namespace
}  // namespace heddle::copies_kernel
