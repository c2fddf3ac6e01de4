// Layers under recovery with ranks as threads: a rank that stops is left out, its experts move, the step is run again with the bits
// of the smaller group; the stopped one learns that it is out, and comes back.
#include "exchange/host_exchange.hpp"
#include "recovery_support.hpp"
#include "stall.hpp"

namespace heddle::layer_test {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds deadline(is_sanitized ? 1500 : 400);

TEST(RecoveryRehome, ExpertsOfTheLostGoToThoseWithTheFewest) {
  const Placement original = Placement::from_map({0, 0, 0, 1, 1, 2, 3, 3}, 4);
  const Placement moved = spread_over_survivors(original, {true, false, true, true});
  EXPECT_EQ(std::vector<int>(moved.rank_map().begin(), moved.rank_map().end()), (std::vector<int>{0, 0, 0, 2, 2, 2, 3, 3}));
  EXPECT_EQ(moved.ranks(), 4);
  const Placement one = spread_over_survivors(original, {false, false, false, true});
  EXPECT_EQ(one.experts_of(3).size(), 8u);
  const Placement all = spread_over_survivors(original, {true, true, true, true});
  EXPECT_EQ(std::vector<int>(all.rank_map().begin(), all.rank_map().end()),
            std::vector<int>(original.rank_map().begin(), original.rank_map().end()));
}

TEST(RecoveryRehome, ALostCopyGoesToARankThatHasAnotherOne) {
  // Experts 0 and 4 are copies of one, 1 and 5 and 6 of another.
  const Placement original = Placement::from_map({0, 0, 1, 1, 2, 2, 3, 3}, 4);
  const Rehome rehome = beside_copies({0, 1, 2, 3, 0, 1, 1, 4});
  const auto map_of = [&](const std::vector<bool>& live) {
    const Placement moved = rehome(original, live);
    return std::vector<int>(moved.rank_map().begin(), moved.rank_map().end());
  };
  EXPECT_EQ(map_of({false, true, true, true}), (std::vector<int>{2, 3, 1, 1, 2, 2, 3, 3}))
      << "2 has three then, so 3 takes the next";
  EXPECT_EQ(map_of({true, false, true, true}), (std::vector<int>{0, 0, 0, 2, 2, 2, 3, 3})) << "nobody has copies of these";
  EXPECT_EQ(map_of({true, true, true, true}), (std::vector<int>{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_THROW(beside_copies({0, 1})(original, {true, true, true, false}), InputError);
}

TEST(RecoveryRehome, WhatCannotMoveIsRefused) {
  EXPECT_THROW(spread_over_survivors(Placement::everywhere(4, 2), {true, false}), InputError);
  EXPECT_THROW(spread_over_survivors(Placement::contiguous(4, 2), {false, false}), InputError);
  run_ranks(1, {}, [](Group& group) {
    Case c = recovery_case(1, {Way::elastic, Reduce::rank}, 1);
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    c.options.tensor_parallel = true;
    EXPECT_THROW(RecoveringLayers(group, {{&source, c.placement, c.options}}), InputError);
  });
}

/// One rank of a test: its layer under recovery, and the comparison of every step.
class Seat {
 public:
  Seat(Group& group, const LayerSource& source, const Case& c, Wanted& wanted, std::mutex& mutex)
      : group_(group), case_(c), wanted_(wanted), mutex_(mutex), layers_(group, {{&source, c.placement, c.options}}, options()) {}

  RecoveringLayers& layers() { return layers_; }
  /// A step whose outputs are those of a group of the members alone.
  void expect_right() {
    const int rank = group_.rank();
    std::vector<bool> used;
    std::uint64_t batch = 0;
    std::vector<bf16> out;
    layers_.step([&] {
      used = layers_.members().live;
      batch = layers_.steps() % 3;
      out = call(case_, layers_.layer(0), draw_tokens(case_, batch), rank);
    });
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(different_bits(out, wanted_.of(rank, used, batch)), 0u)
        << "rank " << rank << ", generation " << layers_.members().generation;
  }

 private:
  static RecoveryOptions options() {
    RecoveryOptions some;
    some.grace = milliseconds(is_sanitized ? 400 : 100);
    return some;
  }
  Group& group_;
  const Case& case_;
  Wanted& wanted_;
  std::mutex& mutex_;
  RecoveringLayers layers_;
};

/// Rank `victim` stops before a verb of its call; the others go on without it; it is let go, learns that it is out, and comes back.
void lose_and_come_back(const Route& route, std::uint64_t seed) {
  constexpr int ranks = 3;
  Chance chance(seed);
  const int victim = chance.between(0, ranks - 1);
  const int verb = chance.between(0, 40);
  const Case c = recovery_case(ranks, route, seed);
  SCOPED_TRACE(testing::Message() << "rank " << victim << " stops before verb " << verb << "; " << text_of(c));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  Wanted wanted(source, c);
  std::mutex mutex;
  Stall stall;
  std::atomic<std::uint32_t> last = 0;
  run_ranks(ranks, {milliseconds(60000)}, [&](Group& group) {
    const int me = group.rank();
    if (me == victim) set_verb_hook([&stall] { stall.before_verb(); });
    Seat seat(group, source, c, wanted, mutex);
    for (int i = 0; i < 2; ++i) seat.expect_right();
    group.barrier("before the stall");
    group.set_deadline(deadline);
    if (me != victim) {
      for (int i = 0; i < 3; ++i) seat.expect_right();
      const Members without = seat.layers().members();
      EXPECT_FALSE(without.live[victim]);
      ASSERT_FALSE(seat.layers().interruptions().empty());
      EXPECT_GT(seat.layers().interruptions().front().agree, 0.0);
      stall.let_go();
      // Steps go on until the lost one has been in for a while.
      while (last == 0 || seat.layers().steps() < last) seat.expect_right();
    } else {
      stall.stop_at(verb);
      EXPECT_THROW(
          {
            for (int i = 0; i < 50; ++i) seat.expect_right();
          },
          LostRankError);
      EXPECT_THROW(seat.expect_right(), LostRankError) << "it is still out";
      stall.stop_at(-1);
      seat.layers().rejoin();
      last = seat.layers().steps() + 3;
      while (seat.layers().steps() < last) seat.expect_right();
    }
    EXPECT_EQ(std::count(seat.layers().members().live.begin(), seat.layers().members().live.end(), true), ranks);
    const std::vector<int> local(c.placement.experts_of(me).begin(), c.placement.experts_of(me).end());
    const auto now = seat.layers().placement(0).experts_of(me);
    EXPECT_EQ(std::vector<int>(now.begin(), now.end()), local) << "experts have not come home";
    seat.layers().close();
  });
  set_verb_hook({});
}

TEST(RecoveryLayers, AStoppedRankIsLeftOutLearnsItAndComesBackInEveryWay) {
  const std::uint64_t seed = announced_seed();
  std::uint64_t number = 0;
  for (const Route& route : host_routes) {
    for (int i = 0; i < rounds(3); ++i) lose_and_come_back(route, seed + number++);
    if (testing::Test::HasFailure()) return;
  }
}

// Another rank's refusal of its input is no loss: the rank comes again, and nobody is missing.
TEST(RecoveryLayers, WhoThrowsComesAgainWithTheSameStep) {
  const Case c = recovery_case(3, {Way::low_latency, Reduce::rank}, 5);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  Wanted wanted(source, c);
  std::mutex mutex;
  run_ranks(3, {milliseconds(20000)}, [&](Group& group) {
    Seat seat(group, source, c, wanted, mutex);
    seat.expect_right();
    if (group.rank() == 2) {
      const std::vector<std::int32_t> bad(3, 99);
      const std::vector<float> weights(3, 1.0f);
      const std::vector<bf16> hidden(128);
      std::vector<bf16> out(128);
      EXPECT_THROW(seat.layers().forward({1, hidden.data(), bad.data(), weights.data()}, step_of(c), out.data()), InputError);
      EXPECT_THROW(seat.layers().step([] { throw std::runtime_error("the caller's own"); }), std::runtime_error);
    }
    for (int i = 0; i < 3; ++i) seat.expect_right();
    EXPECT_EQ(seat.layers().steps(), 4u);
    EXPECT_EQ(std::count(seat.layers().members().live.begin(), seat.layers().members().live.end(), true), 3);
    EXPECT_GT(seat.layers().members().generation, 0u);
    seat.layers().close();
  });
}

// A step of several calls, one of which a rank does not come to: all calls are run again.
TEST(RecoveryLayers, AStepOfSeveralLayersIsRunAgainFromItsBeginning) {
  constexpr int lost = 1;
  Case c = recovery_case(3, {Way::elastic, Reduce::home}, 6);
  Case other = recovery_case(3, {Way::mega, Reduce::rank}, 6);
  other.layer.seed = 12;
  SyntheticLayer layer(c.layer), other_layer(other.layer);
  const LayerSource source = source_of(layer, c), other_source = source_of(other_layer, other);
  Wanted wanted(source, c), other_wanted(other_source, other);
  const Tokens tokens = draw_tokens(c, 6);
  const std::vector<bool> left{true, false, true};
  std::vector<std::vector<bf16>> want, other_want;
  for (int rank = 0; rank < 3; ++rank) {
    want.push_back(wanted.of(rank, left, 6));
    other_want.push_back(other_wanted.of(rank, left, 6));
  }
  run_ranks(3, {deadline}, [&](Group& group) {
    const int me = group.rank();
    RecoveringLayers layers(group, {{&source, c.placement, c.options}, {&other_source, other.placement, other.options}});
    int runs = 0;
    std::vector<bf16> out, other_out;
    const auto body = [&] {
      ++runs;
      out = call(c, layers.layer(0), tokens, me);
      if (me == lost) throw std::runtime_error("gone");
      other_out = call(other, layers.layer(1), tokens, me);
    };
    if (me == lost) {
      EXPECT_THROW(layers.step(body), std::runtime_error);
      return;  // and never comes again
    }
    layers.step(body);
    EXPECT_EQ(runs, 2);
    EXPECT_EQ(layers.members().live, left);
    EXPECT_EQ(different_bits(out, want[static_cast<std::size_t>(me)]), 0u);
    EXPECT_EQ(different_bits(other_out, other_want[static_cast<std::size_t>(me)]), 0u);
    EXPECT_TRUE(layers.interruptions().back().run_again);
    layers.close();
  });
}

}  // namespace
}  // namespace heddle::layer_test
