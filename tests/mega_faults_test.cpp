// What goes wrong on one rank of the fused layer: it stops, anywhere; its input is refused; a worker throws; a count cannot be.
// Every other rank gets a named error in time, nothing hangs, and after a reset all answers are right.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "exchange/host_exchange.hpp"
#include "layer_support.hpp"
#include "mega/host.hpp"
#include "stall.hpp"

namespace heddle::layer_test {
namespace {

constexpr std::chrono::milliseconds deadline(is_sanitized ? 2500 : 1200);

Case small_layer(int ranks, int workers) {
  Case c;
  c.layer.shape = {64, 192, 2 * ranks + 1, 2, std::nullopt};
  c.layer.shared_kind = WeightKind::bf16;
  c.layer.shared_intermediate = 192;
  c.gated_shared = true;  // the gate reads the tokens, too
  c.placement = Placement::contiguous(c.layer.shape.experts, ranks);
  c.options.way = Way::mega;
  c.options.cap = 30;
  c.options.block_rows = 8;
  c.options.workers = workers;
  for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(30 - 2 * rank);
  return c;
}

/// A layer on one rank, over a workspace of its own; what it must give, from the chain.
struct Seat {
  Seat(Group& group, const LayerSource& source, const Case& c) {
    LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    const ExchangeMemory memory = exchange_memory(exchange_options(weights, c.options));
    workspace = std::make_unique<Workspace>(group, memory.heap_bytes(c.ranks()), heddle::describe(weights, c.options));
    layer = std::make_unique<MoeLayer>(*workspace, memory, std::move(weights), c.options);
  }
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<MoeLayer> layer;
};

/// A case with its layer, a batch and what must come out.
struct Subject {
  explicit Subject(const Case& given) : c(given), layer(c.layer), source(source_of(layer, c)), tokens(draw_tokens(c, 1)) {
    Case chain = c;
    chain.options.way = Way::low_latency;
    wanted = run_layer(source, chain, tokens).outputs;
  }
  void expect_right(MoeLayer& on_this_rank, int rank) const {
    EXPECT_EQ(different_bits(call(c, on_this_rank, tokens, rank), part_of(c, wanted, rank)), 0u) << "rank " << rank;
  }
  Case c;
  SyntheticLayer layer;
  LayerSource source;
  Tokens tokens;
  std::vector<bf16> wanted;
};

/// A fault that names a stalled rank: a word of the fused layer, or the meeting of those that dispatch.
void check_fault(const Fault& fault, int ranks, int victim) {
  SCOPED_TRACE(FaultError(fault).what());
  EXPECT_TRUE(fault.rank >= 0 && fault.rank < ranks);
  EXPECT_EQ(fault.peer, victim);
  const bool known = fault.phase == "mega dispatch" || fault.phase == "mega tasks" || fault.phase == "mega combine" ||
                     fault.phase == "team barrier";
  EXPECT_TRUE(known);
  EXPECT_FALSE(fault.word.empty());
  EXPECT_NE(fault.expected, fault.seen);
}

/// One worker of `victim` stops before a verb that is drawn. All ranks, also the victim's own other workers, must hear of it.
void stall_once(const Subject& subject, Seat& seat, int me, int victim, Stall& stall, int verb, const std::atomic<bool>& is_over) {
  std::jthread opener;
  if (me == victim) {
    stall.stop_at(verb);
    opener = std::jthread([&] {
      while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stall.let_go();
    });
  }
  try {
    for (int i = 0; i < 3; ++i) subject.expect_right(*seat.layer, me);
    ADD_FAILURE() << "rank " << me << " went on without a worker of rank " << victim;
  } catch (const FaultError& error) {
    check_fault(error.fault(), subject.c.ranks(), victim);
  }
}

void check_stalls(const Subject& subject, std::uint64_t seed) {
  const int ranks = subject.c.ranks();
  std::vector<Stall> stalls(static_cast<std::size_t>(ranks));
  Chance chance(seed);
  std::vector<std::pair<int, double>> plans;  // who, and how far into the call
  for (int i = 0; i < 5; ++i) plans.emplace_back(chance.between(0, ranks - 1), chance.between(0, 999) / 1000.0);
  std::atomic<int> ended = 0;
  std::atomic<bool> is_over = false;
  run_ranks(ranks, {deadline}, [&](Group& group) {
    const int me = group.rank();
    Stall& mine = stalls[static_cast<std::size_t>(me)];
    set_verb_hook([&mine] { mine.before_verb(); });
    Seat seat(group, subject.source, subject.c);
    set_verb_hook({});
    mine.stop_at(-1);
    subject.expect_right(*seat.layer, me);
    const int verbs = mine.verbs();
    for (const auto& [victim, share] : plans) {
      SCOPED_TRACE(testing::Message() << "a worker of rank " << victim << " stops after " << share << " of its verbs, seed "
                                      << seed);
      ended = 0;
      is_over = false;
      group.barrier("before the stall");
      stall_once(subject, seat, me, victim, mine, 1 + static_cast<int>(share * (verbs - 2)), is_over);
      // The victim's stopped worker goes on when everybody else has given up.
      if (me != victim && ++ended == ranks - 1) is_over = true;
      mine.stop_at(-1);
      seat.workspace->reset();
      for (int i = 0; i < 2; ++i) subject.expect_right(*seat.layer, me);
      if (testing::Test::HasFailure()) break;
    }
    seat.workspace->close();
  });
}

TEST(MegaFaults, AStalledWorkerIsNamedAndAllGoOnAfterAReset) {
  const std::uint64_t seed = announced_seed();
  // The cases wait for their deadlines side by side.
  std::vector<std::jthread> threads;
  for (const int ranks : {2, 3}) {
    for (const int workers : {1, 2}) {
      threads.emplace_back([seed, ranks, workers] {
        check_stalls(Subject(small_layer(ranks, workers)), seed + static_cast<std::uint64_t>(10 * ranks + workers));
      });
    }
  }
}

// Fellow workers wait for each other as well: one that fetches rows stops, the ones with tasks give up.
TEST(MegaFaults, AStalledWorkerIsNoticedByItsOwnRank) {
  const Subject subject(small_layer(1, 1));
  run_ranks(1, {deadline}, [&](Group& group) {
    std::atomic<int> verbs_left = -1;
    std::atomic<bool> is_over = false;
    // The calling thread has the role of dispatch.
    set_verb_hook([&, dispatch = std::this_thread::get_id()] {
      if (std::this_thread::get_id() != dispatch || verbs_left < 0 || verbs_left-- != 0) return;
      while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    Seat seat(group, subject.source, subject.c);
    set_verb_hook({});
    for (const int verb : {5, 150}) {  // before the counts are there; while rows are fetched
      is_over = false;
      verbs_left = verb;
      std::jthread watch([&] {
        while (!is_over) {
          try {
            seat.workspace->throw_if_aborted();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          } catch (const FaultError&) {
            is_over = true;
          }
        }
      });
      try {
        subject.expect_right(*seat.layer, 0);
        ADD_FAILURE() << "nobody noticed that dispatch stopped before verb " << verb;
        is_over = true;
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().phase, "mega tasks") << error.what();
        EXPECT_EQ(error.fault().peer, 0) << error.what();
      }
      watch.join();
      seat.workspace->reset();
      subject.expect_right(*seat.layer, 0);
    }
    seat.workspace->close();
  });
}

TEST(MegaFaults, ARankThatNeverComesIsNamedByItsAnnouncement) {
  const Subject subject(small_layer(3, 1));
  run_ranks(3, {deadline}, [&](Group& group) {
    Seat seat(group, subject.source, subject.c);
    if (group.rank() != 1) {
      try {
        subject.expect_right(*seat.layer, group.rank());
        ADD_FAILURE() << "rank " << group.rank() << " went on without rank 1";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().phase, "mega dispatch") << error.what();
        EXPECT_EQ(error.fault().word, "announcement") << error.what();
        EXPECT_EQ(error.fault().peer, 1) << error.what();
      }
    }
    seat.workspace->reset();
    subject.expect_right(*seat.layer, group.rank());
    seat.workspace->close();
  });
}

struct Mistake {
  const char* what;
  std::function<void(const Subject&, MoeLayer&, int)> make;
};

std::vector<Mistake> mistakes() {
  const auto with = [](auto change) {
    return [change](const Subject& subject, MoeLayer& layer, int rank) {
      Tokens tokens = subject.tokens;
      LayerInput input = input_of(subject.c, tokens, rank);
      Step step = step_of(subject.c);
      std::vector<bf16> out(static_cast<std::size_t>(input.tokens + 1) * 64);
      bf16* to = out.data();
      change(input, const_cast<std::int32_t*>(input.ids), step, to);
      layer.forward(input, step, to);
    };
  };
  return {{"an id out of range", with([](LayerInput&, std::int32_t* ids, Step&, bf16*&) { ids[1] = 1000; })},
          {"an id twice in a token", with([](LayerInput&, std::int32_t* ids, Step&, bf16*&) { ids[0] = ids[1] = 1; })},
          {"more tokens than the step",
           with([](LayerInput& input, std::int32_t*, Step& step, bf16*&) { step.max_tokens = input.tokens - 1; })},
          {"fewer than no tokens", with([](LayerInput& input, std::int32_t*, Step&, bf16*&) { input.tokens = -1; })},
          {"no hidden states", with([](LayerInput& input, std::int32_t*, Step&, bf16*&) { input.hidden = nullptr; })},
          {"no memory for its outputs", with([](LayerInput&, std::int32_t*, Step&, bf16*& out) { out = nullptr; })}};
}

/// Calls until the fault of a rank that gave up in `phase` ends one of them.
void hear_of(const Subject& subject, MoeLayer& layer, int me, int culprit, const char* phase) {
  try {
    for (int i = 0; i < 2; ++i) subject.expect_right(layer, me);
    ADD_FAILURE() << "rank " << me << " did not hear of it";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().rank, culprit) << error.what();
    EXPECT_EQ(error.fault().phase, phase) << error.what();
  }
}

TEST(MegaFaults, RefusedInputIsToldToAllAndTheyGoOn) {
  const Subject subject(small_layer(3, 1));
  run_ranks(3, {std::chrono::seconds(30)}, [&](Group& group) {
    const int me = group.rank();
    Seat seat(group, subject.source, subject.c);
    int culprit = 0;
    for (const Mistake& mistake : mistakes()) {
      SCOPED_TRACE(testing::Message() << "rank " << culprit << " brings " << mistake.what);
      group.barrier("before the mistake");
      if (me == culprit) {
        EXPECT_THROW(mistake.make(subject, *seat.layer, me), InputError);
      } else {
        hear_of(subject, *seat.layer, me, culprit, "input check");
      }
      seat.workspace->reset();
      subject.expect_right(*seat.layer, me);
      culprit = (culprit + 1) % 3;
    }
    seat.workspace->close();
  });
}

TEST(MegaFaults, AStepAboveTheCapIsRefusedAlikeAndNothingIsStarted) {
  const Subject subject(small_layer(2, 1));
  run_ranks(2, {std::chrono::seconds(30)}, [&](Group& group) {
    Seat seat(group, subject.source, subject.c);
    for (int i = 0; i < 2; ++i) {
      std::vector<bf16> out(30 * 64);
      try {
        seat.layer->forward(input_of(subject.c, subject.tokens, group.rank()), {31, Phase::prefill}, out.data());
        ADD_FAILURE() << "31 rows went through a cap of 30";
      } catch (const InputError& error) {
        EXPECT_NE(std::string(error.what()).find("way mega: the step's largest batch is 31 rows, the cap is 30"), std::string::npos)
            << error.what();
      }
      subject.expect_right(*seat.layer, group.rank());  // no reset is needed
    }
    seat.workspace->close();
  });
}

TEST(MegaFaults, AWorkerThatThrowsEndsTheOthersWaits) {
  struct Broken : std::runtime_error {
    Broken() : std::runtime_error("broken") {}
  };
  for (const int workers : {1, 3}) {
    const Subject subject(small_layer(3, workers));
    run_ranks(3, {std::chrono::seconds(30)}, [&](Group& group) {
      const int me = group.rank();
      std::atomic<int> verbs = -1;  // counts down to the verb that throws
      set_verb_hook([&verbs] {
        if (verbs.load() >= 0 && verbs-- == 0) throw Broken();
      });
      Seat seat(group, subject.source, subject.c);
      set_verb_hook({});
      for (int round = 0; round < 6; ++round) {
        const int culprit = round % 3;
        group.barrier("before the exception");
        if (me == culprit) {
          verbs = 3 + 60 * round;
          EXPECT_THROW(subject.expect_right(*seat.layer, me), Broken) << "round " << round;
          verbs = -1;
        } else {
          hear_of(subject, *seat.layer, me, culprit, "call");
        }
        seat.workspace->reset();
        subject.expect_right(*seat.layer, me);
      }
      seat.workspace->close();
    });
  }
}

// What no rank of this library announces: more rows than the cap, or fewer than none.
TEST(MegaFaults, ACountThatCannotBeIsAFault) {
  const Case c = small_layer(2, 1);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  for (const std::int32_t wrong : {31, -1}) {
    run_ranks(2, {std::chrono::seconds(30)}, [&](Group& group) {
      const LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
      const ExchangeOptions options = exchange_options(weights, c.options);
      const ExchangeMemory memory = exchange_memory(options);
      Workspace workspace(group, memory.heap_bytes(2), heddle::describe(weights, c.options));
      if (group.rank() == 0) {
        MegaCall one;
        one.layout = make_mega_layout(options, 1, areas_of(memory, 2));
        one.local_experts = static_cast<int>(weights.experts.size());
        std::vector<std::int32_t> arrived(8), rows(4), ends(4), row_ends(4);
        one.scratch.arrived = arrived.data();
        one.scratch.rows = rows.data();
        one.scratch.ends = ends.data();
        one.scratch.row_ends = row_ends.data();
        *workspace.view().mine<std::int32_t>(one.layout.count(1, 1)) = wrong;
        const HostTeam team{workspace.view(), 1, std::chrono::seconds(1), nullptr, 0, nullptr};
        HostWorker worker(team, 0);
        worker.start(CallPart::dispatch_send);
        EXPECT_FALSE(mega_take_counts(worker, one));
      }
      group.barrier("after the count");
      try {
        workspace.throw_if_aborted();
        ADD_FAILURE() << "rank " << group.rank() << " did not hear of it";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().rank, 0) << error.what();
        EXPECT_EQ(error.fault().peer, 1) << error.what();
        EXPECT_EQ(error.fault().word, "row count, at most the cap, of local expert 1") << error.what();
        EXPECT_EQ(error.fault().expected, 30u) << error.what();
        EXPECT_EQ(error.fault().seen, static_cast<std::uint32_t>(wrong)) << error.what();
      }
      workspace.close();
    });
  }
}

TEST(MegaFaults, DifferentRingsAreNamedOnEveryRank) {
  const Case c = small_layer(2, 1);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  run_ranks(2, {std::chrono::seconds(30)}, [&](Group& group) {
    Case mine = c;
    if (group.rank() == 1) mine.options.block_rows = 16;
    const LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    try {
      Workspace workspace(group, 1 << 20, heddle::describe(weights, mine.options));
      ADD_FAILURE() << "not noticed on rank " << group.rank();
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 was created with block_rows=16, rank 0 with block_rows=8"),
                std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace heddle::layer_test
