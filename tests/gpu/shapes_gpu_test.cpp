// The edges of what is legal, on GPUs: payloads beside rows, one token in all, ranks without experts, many choices, many
// ranks, a cap of one, everything to one rank, nobody to anybody. What arrives is told from the ids alone.
#include <gtest/gtest.h>

#include <array>

#include "exchange_arrivals.hpp"
#include "gpu/device_run.hpp"

namespace heddle {
namespace {

int ranks_here(int at_least) { return (at_least + gpus_here() - 1) / gpus_here() * gpus_here(); }

std::vector<ArrivedLayout> layouts_of(Way way) {
  std::vector<ArrivedLayout> layouts;
  for (const auto layout : {ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed}) {
    if (allows_layout(way, layout)) layouts.push_back(layout);
  }
  return layouts;
}

/// Every way, mode and layout that GPUs have, with the sizes of a case and wires that change from one to the next.
std::vector<Case> in_every_way(const Case& sizes) {
  std::vector<Case> all;
  const ExchangeOptions& base = sizes.options;
  for (const ExchangeOptions& options : every_way_on_gpus(base.hidden, 1, sizes.ranks(), base.topk, base.cap)) {
    for (const ArrivedLayout layout : layouts_of(options.way)) {
      Case c = sizes;
      c.options = options;
      c.options.placement = base.placement;
      c.options.arrived = layout;
      c.options.wire = static_cast<Wire>(all.size() % 3);
      c.options.combine_wire = static_cast<Wire>((all.size() / 3) % 3);
      c.options.weight_at = all.size() % 2 == 0 ? WeightAt::activation : WeightAt::combine;
      all.push_back(c);
    }
  }
  return all;
}

void check_what_arrived(const Round& round, DeviceRun& run) {
  const Case& c = round.the_case();
  for (int rank = 0; rank < c.ranks(); ++rank) {
    SCOPED_TRACE(testing::Message() << "what arrived at rank " << rank);
    const HostArrived arrived = run.arrived(rank);
    ASSERT_EQ(arrived.view.layout, c.options.arrived);
    if (c.options.arrived == ArrivedLayout::routed) {
      check_routed(round, arrived.view, rank);
    } else {
      check_by_expert(round, arrived.view, rank);
    }
    if (testing::Test::HasFailure()) return;
  }
}

/// Rounds in one piece, in halves, and with a gated shared expert.
void check(const Case& c, int rounds = 3) {
  SCOPED_TRACE(testing::Message() << title(c.options) << ", " << c.ranks() << " ranks, seed " << c.seed << "\n"
                                  << describe(c.options));
  DeviceRun run(c, gpus_here());
  for (int number = 0; number < rounds; ++number) {
    SCOPED_TRACE(testing::Message() << "round " << number);
    const Round round(c, number);
    const bool halves = number % 2 == 1 || c.options.way == Way::normal;
    const Shared shared = number % 3 == 2 ? Shared::gated : Shared::none;
    for (int rank = 0; rank < c.ranks(); ++rank) run.load(rank, round.of(rank));
    run.settle();
    const Step step{c.most_tokens(), Phase::decode};
    if (halves) {
      run.dispatch(step, false);
    } else {
      run.dispatch_fused(step);
    }
    run.wait();
    check_what_arrived(round, run);
    if (testing::Test::HasFailure()) return;
    const std::vector<Buffer<bf16>> results = results_of(c, run, nullptr);
    run.settle();
    run.combine(DeviceRun::pointers(results), shared, !halves);
    run.wait();
    for (int rank = 0; rank < c.ranks(); ++rank) {
      const std::vector<bf16> want = expected(c, round.of(rank), {}, shared);
      const std::vector<bf16> have = read(run.seat(rank).out.data(), want.size());
      ASSERT_EQ(differences(want, have.data()), 0) << "outputs of rank " << rank;
    }
  }
}

void check_every_way(const Case& sizes, int rounds = 3) {
  for (const Case& c : in_every_way(sizes)) {
    check(c, rounds);
    if (testing::Test::HasFailure()) return;
  }
}

/// `way` is left to the caller.
Case sizes_of(int hidden, Placement placement, int topk, int cap) {
  Case c;
  c.options.hidden = hidden;
  c.options.placement = std::move(placement);
  c.options.topk = topk;
  c.options.cap = cap;
  c.tokens.assign(static_cast<std::size_t>(c.ranks()), cap);
  c.seed = test_seed() % 100000;
  return c;
}

TEST(ShapesGpu, PayloadsTravelWithTheirTokens) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = test_seed();
  for (const std::vector<std::size_t>& payloads :
       {std::vector<std::size_t>{16}, {4096}, {64, 16}, {16, 4096, 48}, {4096, 1040, 4096}}) {
    for (const int at_least : {1, 3, 8}) {
      Case c;
      c.options = options_for(Way::one_sided, 192, 9, ranks_here(at_least), 3, 20);
      c.options.extra_payloads = payloads;
      c.options.wire = static_cast<Wire>(payloads.size() % 3);
      for (int r = 0; r < c.ranks(); ++r) c.tokens.push_back(r == 1 ? 0 : 20 - r);
      c.seed = seed % 100000;
      check(c);
      if (HasFailure()) return;
    }
  }
}

// One token on one rank, and a rank without experts, in turn: the token's own and another.
TEST(ShapesGpu, OneTokenInAll) {
  SKIP_WITHOUT_GPU();
  const int ranks = ranks_here(4);
  for (const int without_experts : {1, ranks - 1}) {
    std::vector<int> map;
    for (int e = 0; e < 12; ++e) map.push_back((without_experts + 1 + e % (ranks - 1)) % ranks);
    for (const int home : {0, 1, ranks - 1}) {
      Case c = sizes_of(256, Placement::from_map(map, ranks), 3, 20);
      c.tokens.assign(static_cast<std::size_t>(ranks), 0);
      c.tokens[static_cast<std::size_t>(home)] = 1;
      c.none = 0;
      check_every_way(c);
      if (HasFailure()) return;
    }
  }
}

TEST(ShapesGpu, NobodyHasTokens) {
  SKIP_WITHOUT_GPU();
  Case c = sizes_of(256, Placement::contiguous(12, ranks_here(4)), 3, 20);
  c.tokens.assign(c.tokens.size(), 0);
  check_every_way(c);
}

TEST(ShapesGpu, ACapOfOne) {
  SKIP_WITHOUT_GPU();
  for (const int at_least : {1, 2, 8}) {
    check_every_way(sizes_of(64, Placement::contiguous(9, ranks_here(at_least)), 4, 1));
    if (HasFailure()) return;
  }
}

// Top-16 over ranks of three experts, and over one rank that has exactly as many.
TEST(ShapesGpu, SixteenChoices) {
  SKIP_WITHOUT_GPU();
  Case c = sizes_of(320, Placement::contiguous(24, ranks_here(8)), 16, 33);
  c.tokens[1] = 5;
  check_every_way(c);
  if (HasFailure()) return;
  check_every_way(sizes_of(128, Placement::from_map(std::vector<int>(16, 0), ranks_here(2)), 16, 9));
}

TEST(ShapesGpu, AllTokensToOneRank) {
  SKIP_WITHOUT_GPU();
  const int ranks = ranks_here(4);
  for (const int hot : {0, ranks - 1}) {
    Case c = sizes_of(256, Placement::contiguous(20, ranks), 4, 70);
    c.hot = hot;
    c.none = 0;
    check_every_way(c);
    if (HasFailure()) return;
  }
}

// Every choice is -1: outputs are zeros, or the shared expert's rows alone.
TEST(ShapesGpu, NoTokenHasAnExpert) {
  SKIP_WITHOUT_GPU();
  Case c = sizes_of(256, Placement::contiguous(12, ranks_here(4)), 3, 20);
  c.none = 1;
  check_every_way(c);
}

// As many ranks as a GPU takes (two GPUs: 64 ranks), nine experts each.
TEST(ShapesGpu, ThirtyTwoRanksAGpu) {
  SKIP_WITHOUT_GPU();
  const int ranks = 32 * gpus_here();
  Case c = sizes_of(192, Placement::contiguous(9 * ranks, ranks), 8, 20);
  for (std::size_t r = 0; r < c.tokens.size(); ++r) c.tokens[r] = static_cast<int>(r * 7 % 21);
  c.tokens[3] = 20;
  check_every_way(c, 2);
}

// Ranks that do not divide evenly over GPUs, warps or powers of two.
TEST(ShapesGpu, OddNumbersOfRanks) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {3, 7, 13}) {
    if (ranks < gpus_here()) continue;
    Case c = sizes_of(128, Placement::contiguous(17, ranks), 4, 33);
    c.tokens[static_cast<std::size_t>(ranks) / 2] = 0;
    check_every_way(c);
    if (HasFailure()) return;
  }
}

// Numbers of CTAs that change from call to call and, with two GPUs, are not those of the peers: words of many CTAs stay behind
// where few speak next, and a rank hears of more CTAs than it has, or of fewer.
TEST(ShapesGpu, UnlikeNumbersOfCtas) {
  SKIP_WITHOUT_GPU();
  const Case sizes = sizes_of(1024, Placement::contiguous(12, ranks_here(2)), 3, 40);
  for (const Case& c : in_every_way(sizes)) {
    SCOPED_TRACE(testing::Message() << title(c.options) << ", " << c.ranks() << " ranks, seed " << c.seed);
    DeviceRun run(c, gpus_here());
    int round = 0;
    for (const auto& ctas : {std::array{0, 0}, {1, 0}, {0, 3}, {16, 1}, {5, 0}, {2, 40}, {0, 16}}) {
      SCOPED_TRACE(testing::Message() << ctas[0] << " and " << ctas[1] << " CTAs a GPU");
      for (std::size_t gpu = 0; gpu < run.workspace().gpus(); ++gpu) run.remake(gpu, {ctas[gpu % 2]});
      round_trip(c, run, round, false, round % 2 == 1, false);
      if (HasFailure()) return;
      ++round;
    }
  }
}

// Batches of all sizes in turns: launches of one cluster, of half of the CTAs, of all of them, which all meet at one counter.
TEST(ShapesGpu, SizesInTurns) {
  SKIP_WITHOUT_GPU();
  for (const Case& c : in_every_way(sizes_of(512, Placement::contiguous(12, ranks_here(2)), 3, 200))) {
    SCOPED_TRACE(testing::Message() << title(c.options) << ", " << c.ranks() << " ranks, seed " << c.seed);
    DeviceRun run(c, gpus_here());
    int round = 0;
    for (const int tokens : {40, 200, 8, 40, 130, 64, 65, 1, 17, 128}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens a rank");
      Case now = c;
      now.tokens.assign(now.tokens.size(), tokens);
      round_trip(now, run, round, false, round % 2 == 1, false);
      if (HasFailure()) return;
      ++round;
    }
  }
}

// As many choices as a small CTA has threads, and one more.
TEST(ShapesGpu, ManyChoices) {
  SKIP_WITHOUT_GPU();
  const Placement placement = Placement::contiguous(300, ranks_here(2));
  check_every_way(sizes_of(64, placement, 256, 3), 1);
  for (const Case& c : in_every_way(sizes_of(64, placement, 257, 3))) {
    EXPECT_THROW(DeviceRun(c, gpus_here()), InputError) << title(c.options);
  }
}

}  // namespace
}  // namespace heddle
