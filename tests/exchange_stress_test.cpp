// Ways mixed over one workspace, with ranks that are late everywhere: thousands of round trips with
// changing token counts, each checked bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

/// Several ways over one workspace: what they need together, and what ranks compare.
struct Mix {
  std::vector<Case> cases;
  ExchangeMemory memory;
  std::string configuration;

  explicit Mix(std::vector<Case> all) : cases(std::move(all)) {
    for (const Case& c : cases) {
      memory.include(exchange_memory(c.options));
      configuration += title(c.options) + "\n";
    }
  }
  int ranks() const { return cases[0].ranks(); }
};

std::vector<std::unique_ptr<Exchange>> create_all(Workspace& workspace, const Mix& mix) {
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (const Case& c : mix.cases) exchanges.push_back(create_exchange(workspace, c.options, mix.memory));
  return exchanges;
}

/// The case with token counts of this round.
Case with_tokens(Case c, int round) {
  std::mt19937_64 random = generator(c.seed, -1, round);
  c.tokens.clear();
  for (int r = 0; r < c.ranks(); ++r) {
    c.tokens.push_back(random() % 4 == 0 ? 0 : static_cast<int>(random() % static_cast<std::uint64_t>(c.options.cap + 1)));
  }
  return c;
}

/// The thread that creates and runs rank `rank`'s exchanges is late before some verbs, asleep or out of turn.
std::function<void()> lateness(std::uint64_t seed, int rank) {
  return [random = std::make_shared<std::mt19937_64>(generator(seed, rank, 77)), guard = std::make_shared<std::mutex>()] {
    std::uint64_t drawn = 0;
    {
      const std::lock_guard lock(*guard);  // workers of a rank share the generator
      drawn = (*random)() % 1000;
    }
    if (drawn < 4) std::this_thread::sleep_for(std::chrono::microseconds(20 + 25 * drawn));
    if (drawn >= 900) std::this_thread::yield();
  };
}

/// Exchanges of one rank that are created with a hook of their own.
std::vector<std::unique_ptr<Exchange>> create_late(Workspace& workspace, const Mix& mix, std::uint64_t seed) {
  set_verb_hook(lateness(seed, workspace.group().rank()));
  auto exchanges = create_all(workspace, mix);
  set_verb_hook({});
  return exchanges;
}

std::vector<Case> mixed_cases(std::uint64_t seed, int ranks, int workers) {
  std::mt19937_64 random = generator(seed, 1, 2);
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> list{values...};
    return list[random() % list.size()];
  };
  std::vector<Case> cases;
  for (int copy = 0; copy < 2; ++copy) {
    for (ExchangeOptions options : every_way(64 * pick(1, 2, 3), pick(2, 5, 9, 16), ranks, 2, pick(3, 8))) {
      options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
      options.combine_wire = pick(Wire::bf16, Wire::fp8);
      options.weight_at = pick(WeightAt::activation, WeightAt::combine);
      options.workers = 1 + static_cast<int>(random() % static_cast<std::uint64_t>(workers));
      if (options.way == Way::elastic) options.cpu_sync = pick(0, 1) == 1;
      if (options.way == Way::normal || options.way == Way::elastic) {
        options.arrived = pick(ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed);
      }
      Case c;
      c.options = options;
      c.seed = random() % 100000;
      cases.push_back(c);
    }
    // Rows with the flag beside the data: in all steps, or in some.
    Case tagged = cases.back();
    tagged.options = options_for(Way::gather, 64 * pick(1, 2, 3), pick(2, 5, 9, 16), ranks, 2, 8);
    tagged.options.workers = pick(1, workers);
    tagged.options.tagged_tokens = pick(3, 8);
    cases.push_back(tagged);
  }
  return cases;
}

/// Round trips of one context on one rank; all ranks take the ways in the same random order.
void run_context(Group& group, Workspace& workspace, const Mix& mix, std::uint64_t seed, int rounds) {
  const auto exchanges = create_late(workspace, mix, seed);
  std::mt19937_64 order = generator(seed, 3, 4);
  for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
    const std::size_t which = order() % mix.cases.size();
    TripOptions trip;
    trip.shared = static_cast<Shared>(order() % 3);
    trip.all_outputs = order() % 3 == 0;
    round_trip(*exchanges[which], with_tokens(mix.cases[which], round), group.rank(), round, trip);
  }
}

// A rank that has all it waited for in combine may be a whole call ahead of one that has not looked yet.
TEST(Stress, RankThatLooksLateFindsItsWordsAndRows) {
  std::vector<Case> cases;
  for (const int experts : {2, 12}) {
    for (const ExchangeOptions& options : every_way(64, experts, 2, 2, 6)) {
      Case c;
      c.options = options;
      c.tokens = {6, 5};
      c.seed = cases.size();
      cases.push_back(c);
    }
  }
  const Mix mix(cases);
  run_ranks(2, {std::chrono::milliseconds(10000)}, [&](Group& group) {
    Workspace workspace(group, mix.memory.heap_bytes(2), mix.configuration);
    const auto exchanges = create_all(workspace, mix);
    TripOptions late;
    late.between = [&group](int half) {
      if (half == 2 && group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    for (std::size_t first = 0; first < cases.size(); ++first) {
      for (std::size_t next = 0; next < cases.size(); ++next) {
        SCOPED_TRACE("then " + title(cases[next].options));
        round_trip(*exchanges[first], cases[first], group.rank(), 0, late);
        round_trip(*exchanges[next], cases[next], group.rank(), 1);
        if (testing::Test::HasFailure()) return;
      }
    }
  });
}

TEST(Stress, MixedWaysOverOneWorkspaceWithLateRanks) {
  const std::uint64_t seed = test_seed();
  for (const int ranks : {2, 3, 5}) {
    const Mix mix(mixed_cases(seed + static_cast<std::uint64_t>(ranks), ranks, 1));
    run_ranks(ranks, {}, [&](Group& group) {
      Workspace workspace(group, mix.memory.heap_bytes(ranks), mix.configuration);
      poison_heap(workspace, mix.memory);
      run_context(group, workspace, mix, seed, sanitized ? 250 : 500);
      workspace.close();
    });
  }
}

TEST(Stress, SeveralWorkersARank) {
  const std::uint64_t seed = test_seed();
  for (const int ranks : {1, 3}) {
    const Mix mix(mixed_cases(seed + static_cast<std::uint64_t>(ranks), ranks, 4));
    run_ranks(ranks, {}, [&](Group& group) {
      Workspace workspace(group, mix.memory.heap_bytes(ranks), mix.configuration);
      poison_heap(workspace, mix.memory);
      run_context(group, workspace, mix, seed, sanitized ? 250 : 400);
      workspace.close();
    });
  }
}

TEST(Stress, TwoContextsInFlightAtOnce) {
  const std::uint64_t seed = test_seed();
  const int ranks = 3;
  const Mix mixes[] = {Mix(mixed_cases(seed, ranks, 2)), Mix(mixed_cases(seed + 1, ranks, 1))};
  run_ranks(ranks, {}, [&](Group& group) {
    std::vector<std::unique_ptr<Workspace>> workspaces;
    for (const Mix& mix : mixes) {
      workspaces.push_back(std::make_unique<Workspace>(group, mix.memory.heap_bytes(ranks), mix.configuration));
      poison_heap(*workspaces.back(), mix.memory);
    }
    std::string error;
    std::thread other([&] {
      try {
        run_context(group, *workspaces[1], mixes[1], seed + 1, sanitized ? 250 : 300);
      } catch (const std::exception& e) {
        error = e.what();
      }
    });
    std::string own_error;
    try {
      run_context(group, *workspaces[0], mixes[0], seed, sanitized ? 250 : 300);
    } catch (const std::exception& e) {
      own_error = e.what();
    }
    other.join();
    EXPECT_EQ(error, "");
    EXPECT_EQ(own_error, "");
    for (const auto& workspace : workspaces) workspace->close();
  });
}

// One context refuses an input and is reset again and again; the other one flies on.
TEST(Stress, FaultsOfOneContextLeaveTheOtherAlone) {
  const std::uint64_t seed = test_seed();
  const int ranks = 3;
  const Mix flying(mixed_cases(seed, ranks, 1));
  const Mix faulty(mixed_cases(seed + 1, ranks, 1));
  run_ranks(ranks, {}, [&](Group& group) {
    Workspace other(group, flying.memory.heap_bytes(ranks), flying.configuration);
    Workspace workspace(group, faulty.memory.heap_bytes(ranks), faulty.configuration);
    std::string error;
    {
      const std::jthread flight([&] {
        try {
          run_context(group, other, flying, seed, sanitized ? 200 : 400);
        } catch (const std::exception& e) {
          error = e.what();
        }
      });
      const auto exchanges = create_all(workspace, faulty);
      for (int round = 0; round < 30; ++round) {
        const std::size_t which = static_cast<std::size_t>(round) % faulty.cases.size();
        const Case c = with_tokens(faulty.cases[which], round);
        const bool refused = group.rank() == round % ranks;
        if (refused) {
          EXPECT_THROW(exchanges[which]->dispatch({-1, nullptr, nullptr, nullptr, {}}, {1, Phase::decode}), InputError);
        } else {
          EXPECT_THROW(for (int call = 0; call < 2; ++call) round_trip(*exchanges[which], c, group.rank(), round), FaultError);
        }
        workspace.reset();
        round_trip(*exchanges[which], c, group.rank(), round);
        group.barrier("after the round trip");
      }
    }
    EXPECT_EQ(error, "");
    workspace.close();
    other.close();
  });
}

}  // namespace
}  // namespace heddle
