// gather whose rows travel with the flag beside the data: steps on both sides of the limit in turn, words of many calls and of
// exchanges of other sizes in one place, refusals, and a rank that does not come.
#include <gtest/gtest.h>

#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

Case tagged_case(int hidden, int ranks, int topk, int cap, int tagged, std::vector<int> tokens) {
  Case c;
  c.options = options_for(Way::gather, hidden, 12, ranks, topk, cap);
  c.options.tagged_tokens = tagged;
  c.tokens = std::move(tokens);
  return c;
}

/// What one rank does with the exchanges of some cases, which share a workspace.
void with_exchanges(const std::vector<Case>& cases, const std::function<void(std::vector<std::unique_ptr<Exchange>>&, int)>& work) {
  run_ranks(cases[0].ranks(), {}, [&](Group& group) {
    ExchangeMemory memory;
    for (const Case& c : cases) memory.include(exchange_memory(c.options));
    Workspace workspace(group, memory.heap_bytes(group.ranks()), describe(cases[0].options));
    poison_heap(workspace, memory);
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (const Case& c : cases) exchanges.push_back(create_exchange(workspace, c.options, memory));
    work(exchanges, group.rank());
    workspace.close();
  });
}

// The same exchange takes steps below, at and above its limit, without tokens on some ranks, on all, and in the step.
TEST(TaggedGather, StepsOfEverySize) {
  for (const int workers : {1, 3}) {
    Case c = tagged_case(192, 3, 5, 9, 4, {});
    c.options.workers = workers;
    with_exchanges({c}, [&](auto& exchanges, int rank) {
      int round = 0;
      for (const std::vector<int>& tokens : std::vector<std::vector<int>>{
               {4, 4, 4}, {1, 0, 0}, {0, 3, 1}, {9, 2, 0}, {0, 0, 0}, {4, 1, 2}, {5, 4, 4}, {0, 0, 2}, {2, 2, 2}}) {
        Case now = c;
        now.tokens = tokens;
        TripOptions trip;
        trip.shared = round % 3 == 0 ? Shared::none : round % 3 == 1 ? Shared::gated : Shared::rows;
        trip.all_outputs = round % 2 == 1;
        round_trip(*exchanges[0], now, rank, round++, trip);
        if (testing::Test::HasFailure()) return;
      }
    });
  }
}

// Places of one exchange's words are other ranks' places of another's.
TEST(TaggedGather, ExchangesOfOtherSizesInOneWorkspace) {
  const std::vector<Case> cases{tagged_case(64, 3, 1, 6, 6, {6, 0, 5}), tagged_case(320, 3, 7, 8, 3, {3, 2, 1}),
                                tagged_case(128, 3, 2, 6, 0, {1, 6, 4}), tagged_case(192, 3, 12, 2, 1, {1, 1, 0})};
  with_exchanges(cases, [&](auto& exchanges, int rank) {
    std::mt19937_64 random(7);  // the same on all ranks
    for (int round = 0; round < 24 && !testing::Test::HasFailure(); ++round) {
      const std::size_t which = random() % cases.size();
      round_trip(*exchanges[which], cases[which], rank, round);
    }
  });
}

TEST(TaggedGather, RefusedByName) {
  const auto expect_refused = [](const ExchangeOptions& options, const std::string& part) {
    try {
      check_options(options);
      ADD_FAILURE() << "was accepted; should name " << part;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  ExchangeOptions options = tagged_case(64, 2, 2, 8, 8, {}).options;
  EXPECT_NO_THROW(check_options(options));
  options.tagged_tokens = 9;
  expect_refused(options, "tagged_tokens is 9; 0 to the cap, 8, is possible");
  options.tagged_tokens = -1;
  expect_refused(options, "tagged_tokens is -1");
  options.tagged_tokens = 8;
  options.combine_wire = Wire::fp8;
  expect_refused(options, "bf16 wires in both directions");
  options.combine_wire = Wire::bf16;
  options.gather = GatherMode::uneven;
  expect_refused(options, "GatherMode::padded");
  options = options_for(Way::one_sided, 64, 12, 2, 2, 8);
  options.tagged_tokens = 1;
  expect_refused(options, "tagged_tokens is for gather");
}

// A rank that stays away from dispatch, or from combine, is named by the word that it owes.
TEST(TaggedGather, AMissingRankIsNamed) {
  for (const bool from_combine : {false, true}) {
    GroupOptions group_options;
    group_options.deadline = std::chrono::milliseconds(300);
    run_ranks(2, group_options, [&](Group& group) {
      const Case c = tagged_case(64, 2, 2, 4, 4, {3, 3});
      const ExchangeMemory memory = exchange_memory(c.options);
      Workspace workspace(group, memory.heap_bytes(2), describe(c.options));
      const auto exchange = create_exchange(workspace, c.options, memory);
      const RankData data = draw(c, group.rank(), 0);
      const auto dispatch = [&] {
        exchange->dispatch_send(data.input(3), {3, Phase::decode});
        return exchange->dispatch_receive();
      };
      if (group.rank() == 0) {
        try {
          const std::vector<bf16> results = run_experts(c, dispatch(), 0);
          exchange->combine_send(results.data());
          std::vector<bf16> out(3 * 64);
          exchange->combine_receive({out.data()});
          ADD_FAILURE() << "rank 0 came through a call without rank 1";
        } catch (const FaultError& error) {
          const std::string text = error.what();
          EXPECT_NE(text.find(from_combine ? "flag of the partial sums from rank 1" : "arrival flag from rank 1"),
                    std::string::npos)
              << text;
        }
      } else if (from_combine) {
        dispatch();
      }
      group.set_deadline(std::chrono::seconds(20));
      group.barrier("after the fault");
    });
  }
}

}  // namespace
}  // namespace heddle
