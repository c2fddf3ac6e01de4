// What goes wrong on one rank: it stops, its input is refused, its options differ, a worker throws. Every
// other rank gets a named error in time, nothing hangs, and after a reset all answers are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "exchange_support.hpp"
#include "exchange_trip.hpp"
#include "ranks.hpp"
#include "stall.hpp"

namespace heddle {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds deadline(sanitized ? 2500 : 1500);

enum class Where { before_dispatch, in_a_half, before_combine };

struct StallPlan {
  Where where = Where::before_dispatch;
  int victim = 0;
  std::uint64_t draw = 0;  ///< decides the verb
};

/// Fields of a fault that nobody but the victim can have caused.
void check_stall(const Fault& fault, const Case& c, const StallPlan& plan, int me) {
  SCOPED_TRACE(testing::Message() << "rank " << me << " heard: " << FaultError(fault).what());
  EXPECT_TRUE(fault.rank >= 0 && fault.rank < c.ranks());
  EXPECT_TRUE(fault.peer >= 0 && fault.peer < c.ranks());
  EXPECT_FALSE(fault.word.empty());
  EXPECT_NE(fault.expected, fault.seen);
  const std::string way(name(c.options.way));
  if (plan.where == Where::in_a_half) {
    const bool known = fault.phase == way + " dispatch" || fault.phase == way + " combine" || fault.phase == "team barrier" ||
                       fault.phase == "all-gather of the outputs";
    EXPECT_TRUE(known);
    return;
  }
  EXPECT_EQ(fault.phase, way + (plan.where == Where::before_dispatch ? " dispatch" : " combine"));
  EXPECT_EQ(fault.peer, plan.victim);
  EXPECT_NE(fault.rank, plan.victim);
}

/// Round trips until one ends in a fault, which must come within twice the deadline.
void run_until_fault(Exchange& exchange, const Case& c, const StallPlan& plan, int me, int round) {
  for (int call = 0; call < 3; ++call) {
    const auto since = Clock::now();
    try {
      round_trip(exchange, c, me, round + call);
    } catch (const FaultError& error) {
      EXPECT_LT(Clock::now() - since, 2 * deadline);
      check_stall(error.fault(), c, plan, me);
      return;
    }
  }
  ADD_FAILURE() << "rank " << me << " went on without rank " << plan.victim;
}

/// The victim's side: it stops, and hears of it when it comes back.
void run_victim(Exchange& exchange, const Case& c, const StallPlan& plan, Stall& stall, int verbs, int round) {
  TripOptions trip;
  stall.stop_at(-1);
  if (plan.where == Where::before_dispatch) stall.wait_at_the_gate();
  if (plan.where == Where::before_combine) {
    trip.between = [&stall](int half) {
      if (half == 1) stall.wait_at_the_gate();
    };
  }
  if (plan.where == Where::in_a_half) stall.stop_at(1 + static_cast<int>(plan.draw % static_cast<std::uint64_t>(verbs - 1)));
  try {
    for (int call = 0; call < 3; ++call) round_trip(exchange, c, plan.victim, round + call, trip);
    ADD_FAILURE() << "rank " << plan.victim << " never heard that the others gave it up";
  } catch (const FaultError&) {
  }
}

/// One way, ranks that stop in several places one after the other, a reset and right answers after each.
void check_stalls(const Case& c, std::uint64_t seed) {
  std::vector<StallPlan> plans;
  std::mt19937_64 random = generator(seed, static_cast<int>(c.options.way), static_cast<int>(c.options.gather));
  for (const Where where : {Where::before_dispatch, Where::in_a_half, Where::before_combine, Where::in_a_half, Where::in_a_half}) {
    plans.push_back({where, static_cast<int>(random() % static_cast<std::uint64_t>(c.ranks())), random()});
  }
  std::vector<Stall> stalls(static_cast<std::size_t>(c.ranks()));
  std::atomic<int> ended = 0;
  run_ranks(c.ranks(), {deadline}, [&](Group& group) {
    const int me = group.rank();
    Stall& mine = stalls[static_cast<std::size_t>(me)];
    const ExchangeMemory memory = exchange_memory(c.options);
    Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(c.options));
    set_verb_hook([&mine] { mine.before_verb(); });
    const auto exchange = create_exchange(workspace, c.options, memory);
    mine.stop_at(-1);
    round_trip(*exchange, c, me, 0);
    const int verbs = mine.verbs();
    int round = 1;
    for (const StallPlan& plan : plans) {
      SCOPED_TRACE(testing::Message() << "stall " << static_cast<int>(plan.where) << " of rank " << plan.victim << ", seed "
                                      << seed);
      ended = 0;
      group.barrier("before the stall");
      if (me == plan.victim) {
        run_victim(*exchange, c, plan, mine, verbs, round);
      } else {
        run_until_fault(*exchange, c, plan, me, round);
        if (++ended == c.ranks() - 1) stalls[static_cast<std::size_t>(plan.victim)].let_go();
      }
      mine.stop_at(-1);
      workspace.reset();
      round += 3;
      for (int after = 0; after < 2; ++after) round_trip(*exchange, c, me, round++);
      if (testing::Test::HasFailure()) break;
    }
    workspace.close();
  });
}

std::vector<Case> cases_of_three_ranks() {
  std::vector<Case> cases;
  for (const ExchangeOptions& options : every_way(64, 7, 3, 3, 6)) {
    Case c;
    c.options = options;
    c.tokens = {6, 4, 5};
    c.seed = cases.size();
    cases.push_back(c);
  }
  return cases;
}

TEST(Faults, StalledRankIsNamedAndAllGoOnAfterAReset) {
  const std::uint64_t seed = test_seed();
  // The ways wait for their deadlines side by side; each with one and with two workers a rank.
  std::vector<std::thread> threads;
  for (const int workers : {1, 2}) {
    for (Case c : cases_of_three_ranks()) {
      c.options.workers = workers;
      threads.emplace_back([c, seed, workers] { check_stalls(c, seed + static_cast<std::uint64_t>(workers)); });
    }
  }
  for (auto& thread : threads) thread.join();
}

/// A rank's call that only this rank can know to be wrong. Returns what the others must hear of.
using Mistake = std::function<void(Exchange&, const Case&, int rank)>;

struct NamedMistake {
  const char* what;
  const char* phase;
  Mistake make;
};

void dispatch(Exchange& exchange, const Case& c, const RankData& data, int tokens) {
  exchange.dispatch(data.input(tokens), {c.most_tokens(), Phase::decode});
}

std::vector<NamedMistake> mistakes() {
  return {
      {"an id out of range", "input check",
       [](Exchange& exchange, const Case& c, int rank) {
         RankData data = draw(c, rank, 0);
         data.ids[1] = c.options.placement.experts();
         dispatch(exchange, c, data, c.tokens_of(rank));
       }},
      {"an id twice in a token", "input check",
       [](Exchange& exchange, const Case& c, int rank) {
         RankData data = draw(c, rank, 0);
         data.ids[0] = data.ids[2] = 1;
         dispatch(exchange, c, data, c.tokens_of(rank));
       }},
      {"more tokens than the step", "input check",
       [](Exchange& exchange, const Case& c, int rank) { dispatch(exchange, c, draw(c, rank, 0), c.most_tokens() + 1); }},
      {"no hidden states", "input check",
       [](Exchange& exchange, const Case& c, int rank) {
         const RankData data = draw(c, rank, 0);
         exchange.dispatch({c.tokens_of(rank), nullptr, data.ids.data(), data.weights.data(), {}},
                           {c.most_tokens(), Phase::decode});
       }},
      {"a payload that was not announced", "input check",
       [](Exchange& exchange, const Case& c, int rank) {
         const RankData data = draw(c, rank, 0);
         ExchangeInput input = data.input(c.tokens_of(rank));
         input.extra.push_back(nullptr);
         exchange.dispatch(input, {c.most_tokens(), Phase::decode});
       }},
      {"a slice outside of the batch", "input check",
       [](Exchange& exchange, const Case& c, int rank) {
         const RankData data = draw(c, rank, 0);
         const Arrived arrived = exchange.dispatch(data.input(c.tokens_of(rank)), {c.most_tokens(), Phase::decode});
         exchange.combine_send(run_experts(c, arrived, rank).data());
         std::vector<bf16> out(data.hidden.size());
         CombineOutput output;
         output.out = out.data();
         output.all_out = c.tensor_parallel() ? nullptr : out.data();
         output.first = -1;
         output.all_tokens = c.most_tokens();
         exchange.combine_receive(output);
       }},
  };
}

/// The other ranks of a call in which one rank is refused: a fault that names it.
void expect_refusal(Exchange& exchange, const Case& c, int me, int culprit, const NamedMistake& mistake) {
  try {
    for (int call = 0; call < 2; ++call) round_trip(exchange, c, me, call);
    ADD_FAILURE() << "rank " << me << " did not hear of rank " << culprit;
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().rank, culprit) << error.what();
    EXPECT_EQ(error.fault().phase, mistake.phase) << error.what();
    EXPECT_FALSE(error.fault().word.empty());
  }
}

TEST(Faults, RefusedInputIsToldToAllAndTheyGoOn) {
  for (const Case& c : cases_of_three_ranks()) {
    run_ranks(3, {std::chrono::seconds(30)}, [&](Group& group) {
      const int me = group.rank();
      const ExchangeMemory memory = exchange_memory(c.options);
      Workspace workspace(group, memory.heap_bytes(3), describe(c.options));
      const auto exchange = create_exchange(workspace, c.options, memory);
      int culprit = 0;
      for (const NamedMistake& mistake : mistakes()) {
        SCOPED_TRACE(testing::Message() << title(c.options) << ": rank " << culprit << " brings " << mistake.what);
        group.barrier("before the mistake");  // a fault may reach a rank that is still busy with the last call
        if (me == culprit) {
          EXPECT_THROW(mistake.make(*exchange, c, me), InputError);
        } else {
          expect_refusal(*exchange, c, me, culprit, mistake);
        }
        workspace.reset();
        for (int round = 0; round < 2; ++round) round_trip(*exchange, c, me, round);
        culprit = (culprit + 1) % 3;
      }
      workspace.close();
    });
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Faults, StepAboveTheCapIsRefusedAlikeAndNothingIsStarted) {
  for (const Case& c : cases_of_three_ranks()) {
    run_ranks(3, {std::chrono::seconds(30)}, [&](Group& group) {
      const ExchangeMemory memory = exchange_memory(c.options);
      Workspace workspace(group, memory.heap_bytes(3), describe(c.options));
      const auto exchange = create_exchange(workspace, c.options, memory);
      for (int round = 0; round < 2; ++round) {
        const RankData data = draw(c, group.rank(), round);
        const int most = c.tensor_parallel() ? 3 * c.options.cap : c.options.cap;
        try {
          exchange->dispatch(data.input(c.tokens_of(group.rank())), {most + 1, Phase::prefill});
          ADD_FAILURE() << title(c.options);
        } catch (const InputError& error) {
          const std::string text = error.what();
          EXPECT_NE(text.find(std::to_string(most + 1) + " rows"), std::string::npos) << text;
          EXPECT_NE(text.find("the cap is " + std::to_string(most)), std::string::npos) << text;
        }
        round_trip(*exchange, c, group.rank(), round);  // no reset is needed
      }
      workspace.close();
    });
  }
}

TEST(Faults, WorkerThatThrowsEndsTheOthersWaits) {
  struct Broken : std::runtime_error {
    Broken() : std::runtime_error("broken") {}
  };
  for (const int workers : {1, 3}) {
    for (Case c : cases_of_three_ranks()) {
      c.options.workers = workers;
      run_ranks(3, {std::chrono::seconds(30)}, [&](Group& group) {
        const ExchangeMemory memory = exchange_memory(c.options);
        Workspace workspace(group, memory.heap_bytes(3), describe(c.options));
        std::atomic<int> verbs = -1;  // counts down to the verb that throws
        set_verb_hook([&verbs] {
          if (verbs.load() >= 0 && verbs-- == 0) throw Broken();
        });
        const auto exchange = create_exchange(workspace, c.options, memory);
        for (int round = 0; round < 4; ++round) {
          const int culprit = round % 3;
          group.barrier("before the exception");
          if (group.rank() == culprit) {
            verbs = 4 + 9 * round;
            EXPECT_THROW(for (int call = 0; call < 2; ++call) round_trip(*exchange, c, culprit, call), Broken) << title(c.options);
            verbs = -1;
          } else {
            expect_refusal(*exchange, c, group.rank(), culprit, {"", "call", {}});
          }
          workspace.reset();
          round_trip(*exchange, c, group.rank(), round);
        }
        workspace.close();
      });
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Faults, DifferentOptionsAreNamedOnEveryRank) {
  const Case c = cases_of_three_ranks()[5];
  struct Difference {
    const char* want;
    std::function<void(ExchangeOptions&)> make;
  };
  const Difference differences[] = {
      {"rank 2 was created with cap=7, rank 0 with cap=6", [](ExchangeOptions& o) { o.cap = 7; }},
      {"rank 2 was created with hidden=128, rank 0 with hidden=64", [](ExchangeOptions& o) { o.hidden = 128; }},
      {"rank 2 was created with topk=2, rank 0 with topk=3", [](ExchangeOptions& o) { o.topk = 2; }},
      {"rank 2 was created with way=one_sided, rank 0 with way=low_latency",
       [](ExchangeOptions& o) { o = options_for(Way::one_sided, 64, 7, 3, 3, 6); }},
      {"rank 2 was created with experts=8, rank 0 with experts=7",
       [](ExchangeOptions& o) { o.placement = Placement::contiguous(8, 3); }},
      {"rank 2 was created with placement=",
       [](ExchangeOptions& o) {
         o.placement = Placement::from_map({0, 1, 2, 0, 1, 2, 0}, 3);
       }},
      {"rank 2 was created with wire=", [](ExchangeOptions& o) { o.wire = Wire::fp8; }},
      {"rank 2 was created with combine_wire=", [](ExchangeOptions& o) { o.combine_wire = Wire::nvfp4; }},
      {"rank 2 was created with group=32, rank 0 with group=128", [](ExchangeOptions& o) { o.quantisation.group = 32; }},
      {"rank 2 was created with weight_at=", [](ExchangeOptions& o) { o.weight_at = WeightAt::combine; }},
  };
  run_ranks(3, {std::chrono::seconds(30)}, [&](Group& group) {
    for (const Difference& difference : differences) {
      ExchangeOptions options = c.options;
      if (group.rank() == 2) difference.make(options);
      try {
        Workspace workspace(group, exchange_memory(options).heap_bytes(3), describe(options));
        ADD_FAILURE() << "rank " << group.rank() << " saw no difference: " << difference.want;
      } catch (const InputError& error) {
        EXPECT_NE(std::string(error.what()).find(difference.want), std::string::npos) << error.what();
      }
      // The group is as good as before.
      Workspace workspace(group, exchange_memory(c.options).heap_bytes(3), describe(c.options));
      const auto exchange = create_exchange(workspace, c.options, exchange_memory(c.options));
      round_trip(*exchange, c, group.rank(), 0);
      workspace.close();
    }
  });
}

}  // namespace
}  // namespace heddle
