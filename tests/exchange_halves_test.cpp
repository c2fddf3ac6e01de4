// What arrives and what travels, told from the ids alone; halves apart with other work in between; outputs
// that every rank wants; payloads beside the rows.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>

#include "exchange_arrivals.hpp"
#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

/// A rank's workspace and the one way in it.
struct Context {
  Case the_case;
  ExchangeMemory memory;
  Workspace workspace;
  std::unique_ptr<Exchange> exchange;

  Context(Group& group, const Case& c)
      : the_case(c), memory(exchange_memory(c.options)), workspace(group, memory.heap_bytes(c.ranks()), describe(c.options)) {
    poison_heap(workspace, memory);
    exchange = create_exchange(workspace, c.options, memory);
  }
};

std::vector<ArrivedLayout> layouts_of(Way way) {
  std::vector<ArrivedLayout> layouts;
  for (const auto layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
    if (allows_layout(way, layout)) layouts.push_back(layout);
  }
  return layouts;
}

/// Every way, mode and layout over `ranks` ranks, one of which has no experts and one no tokens.
std::vector<Case> all_cases(int ranks, std::uint64_t seed) {
  std::mt19937_64 random = generator(seed, ranks, 11);
  std::vector<Case> cases;
  for (const ExchangeOptions& base : every_way(64 * (1 + static_cast<int>(random() % 3)), 9, ranks, 4, 7)) {
    for (const ArrivedLayout layout : layouts_of(base.way)) {
      for (const bool cpu_sync : {false, true}) {
        if (cpu_sync && base.way != Way::elastic) continue;
        Case c;
        c.options = base;
        c.options.arrived = layout;
        c.options.cpu_sync = cpu_sync;
        std::vector<int> map;
        for (int e = 0; e < 9; ++e)
          map.push_back(static_cast<int>(random() % static_cast<std::uint64_t>(ranks > 1 ? ranks - 1 : 1)));
        c.options.placement = Placement::from_map(map, ranks);
        c.options.wire = static_cast<Wire>(random() % 3);
        c.options.combine_wire = static_cast<Wire>(random() % 3);
        c.options.weight_at = random() % 2 == 0 ? WeightAt::activation : WeightAt::combine;
        c.options.workers = 1 + static_cast<int>(random() % 3);
        for (int r = 0; r < ranks; ++r) c.tokens.push_back(1 + static_cast<int>(random() % 7));
        if (ranks > 1) c.tokens[1] = 0;
        c.seed = random() % 100000;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

TEST(Arrivals, RowsPlacesAndTrafficFollowFromTheIds) {
  const std::uint64_t seed = test_seed();
  for (const int ranks : {1, 2, 4}) {
    for (const Case& c : all_cases(ranks, seed)) {
      SCOPED_TRACE(describe(c.options));
      run_ranks(ranks, {}, [&](Group& group) {
        Context context(group, c);
        const int me = group.rank();
        for (int number = 0; number < 3; ++number) {
          const Round round(c, number);
          ExchangeTraffic on_the_way;
          TripOptions trip;
          trip.all_outputs = number == 1;
          trip.look = [&](const Arrived& arrived) {
            check_arrived(round, arrived, me);
            on_the_way = context.exchange->take_traffic();
          };
          round_trip(*context.exchange, c, me, number, trip);
          SCOPED_TRACE(testing::Message() << "rank " << me << ", round " << number);
          expect_traffic(on_the_way, {dispatched(round, me)}, me);
          std::vector<Moved> back{combined(round, me)};
          if (c.tensor_parallel() || trip.all_outputs) {
            const std::int64_t rows = c.tensor_parallel() ? back[0].rows[0] : c.tokens_of(me);
            back.push_back(
                {std::vector<std::int64_t>(static_cast<std::size_t>(ranks), rows), 2 * static_cast<std::size_t>(c.options.hidden)});
          }
          expect_traffic(context.exchange->take_traffic(), back, me);
          expect_traffic(context.exchange->take_traffic(), {}, me);
        }
        context.workspace.close();
      });
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Halves, EveryRankWantsAllOutputs) {
  const std::uint64_t seed = test_seed();
  for (const Case& c : all_cases(3, seed)) {
    run_ranks(3, {}, [&](Group& group) {
      Context context(group, c);
      for (int round = 0; round < 6; ++round) {
        TripOptions trip;
        trip.all_outputs = true;
        trip.shared = static_cast<Shared>(round % 3);
        round_trip(*context.exchange, c, group.rank(), round, trip);
      }
      context.workspace.close();
    });
    if (testing::Test::HasFailure()) return;
  }
}

// Between the halves of one way another context makes whole round trips, on the same thread.
TEST(Halves, OtherWorkFitsInBetween) {
  const std::uint64_t seed = test_seed();
  const std::vector<Case> cases = all_cases(2, seed);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const Case& other = cases[(i + 5) % cases.size()];
    run_ranks(2, {}, [&](Group& group) {
      Context outer(group, c);
      Context inner(group, other);
      int count = 0;
      TripOptions trip;
      trip.between = [&](int) { round_trip(*inner.exchange, other, group.rank(), count++); };
      for (int round = 0; round < 3; ++round) round_trip(*outer.exchange, c, group.rank(), round, trip);
      EXPECT_EQ(count, 9);
      outer.workspace.close();
      inner.workspace.close();
    });
    if (testing::Test::HasFailure()) return;
  }
}

// A way may be made over a workspace while another one there is between its halves.
TEST(Halves, AnotherWayIsMadeInBetween) {
  const std::uint64_t seed = test_seed();
  for (const Case& c : all_cases(2, seed)) {
    run_ranks(2, {std::chrono::milliseconds(5000)}, [&](Group& group) {
      Context context(group, c);
      std::vector<std::unique_ptr<Exchange>> others;
      TripOptions trip;
      trip.between = [&](int) { others.push_back(create_exchange(context.workspace, c.options, context.memory)); };
      for (int round = 0; round < 2; ++round) round_trip(*context.exchange, c, group.rank(), round, trip);
      EXPECT_EQ(others.size(), 6u);
      context.workspace.close();
    });
    if (testing::Test::HasFailure()) return;
  }
}

// Two contexts on one thread, each half of one followed by the same half of the other.
TEST(Halves, TwoContextsTakeTurns) {
  const std::uint64_t seed = test_seed();
  for (const Way way : {Way::low_latency, Way::elastic, Way::one_sided}) {
    Case c;
    c.options = options_for(way, 128, 6, 3, 2, 8);
    c.tokens = {8, 0, 5};
    c.seed = seed % 100000;
    run_ranks(3, {}, [&](Group& group) {
      Context contexts[] = {{group, c}, {group, c}};
      for (int round = 0; round < 20; ++round) {
        RankData data[2] = {draw(c, group.rank(), 2 * round), draw(c, group.rank(), 2 * round + 1)};
        std::vector<bf16> results[2];
        for (int i : {0, 1}) contexts[i].exchange->dispatch_send(data[i].input(c.tokens_of(group.rank())), {8, Phase::decode});
        for (int i : {0, 1}) results[i] = run_experts(c, contexts[i].exchange->dispatch_receive(), group.rank());
        for (int i : {0, 1}) contexts[i].exchange->combine_send(results[i].data());
        for (int i : {0, 1}) {
          const std::vector<bf16> want = expected(c, data[i]);
          std::vector<bf16> out(want.size() + 1, poison);
          CombineOutput output;
          output.out = out.data();
          contexts[i].exchange->combine_receive(output);
          EXPECT_EQ(differences(want, out.data()), 0) << name(way) << " context " << i << " round " << round;
        }
      }
      for (Context& context : contexts) context.workspace.close();
    });
  }
}

// A rank's send halves end though no other rank has come yet; otherwise nothing could overlap.
TEST(Halves, SendHalvesWaitForNobody) {
  for (const ExchangeOptions& options : every_way(64, 8, 2, 2, 4)) {
    if (options.way == Way::gather || options.way == Way::normal) continue;  // they exchange counts, or rows for room
    Case c;
    c.options = options;
    c.tokens = {4, 3};
    std::atomic<int> dispatched_by_0 = 0;
    std::atomic<int> combined_by_0 = 0;
    run_ranks(2, {std::chrono::milliseconds(10000)}, [&](Group& group) {
      Context context(group, c);
      const bool first = group.rank() == 0;
      const auto follow = [first](std::atomic<int>& flag, int round) {
        if (first) {
          flag = round;
          flag.notify_all();
          return;
        }
        for (int seen = flag; seen < round; seen = flag) flag.wait(seen);
      };
      const std::shared_ptr<void> let_go(nullptr, [&](void*) {  // also if rank 0 leaves by an exception
        for (std::atomic<int>* flag : {&dispatched_by_0, &combined_by_0}) follow(*flag, first ? 1000 : 0);
      });
      for (int round = 1; round <= 20; ++round) {
        // Rank 1 begins each half only after rank 0's send half has returned.
        if (!first) follow(dispatched_by_0, round);
        TripOptions trip;
        trip.between = [&](int half) {
          if (half == 0 && first) follow(dispatched_by_0, round);
          if (half == 1 && !first) follow(combined_by_0, round);
          if (half == 2 && first) follow(combined_by_0, round);
        };
        round_trip(*context.exchange, c, group.rank(), round, trip);
      }
      context.workspace.close();
    });
  }
}

TEST(Halves, PayloadsTravelWithTheirTokens) {
  const std::uint64_t seed = test_seed();
  for (const std::vector<std::size_t>& payloads : {std::vector<std::size_t>{16}, {64, 16}, {16, 4096, 48}}) {
    for (const int ranks : {1, 3}) {
      Case c;
      c.options = options_for(Way::one_sided, 64, 8, ranks, 3, 9);
      c.options.extra_payloads = payloads;
      c.options.workers = ranks;
      for (int r = 0; r < ranks; ++r) c.tokens.push_back(r == 1 ? 0 : 9 - r);
      c.seed = seed % 100000;
      run_ranks(ranks, {}, [&](Group& group) {
        Context context(group, c);
        for (int number = 0; number < 5; ++number) {
          const Round round(c, number);
          TripOptions trip;
          trip.look = [&](const Arrived& arrived) { check_arrived(round, arrived, group.rank()); };
          round_trip(*context.exchange, c, group.rank(), number, trip);
        }
        context.workspace.close();
      });
    }
  }
}

}  // namespace
}  // namespace heddle
