// Way auto: the table's best way, the same on all ranks, with that way's bits; tables that differ are refused; memory is known
// before.
#include <fmt/format.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "layer/candidates.hpp"
#include "layer_tables.hpp"

namespace heddle::layer_test {
namespace {

/// Any layer of way auto.
Case auto_case(std::uint64_t seed) {
  Chance chance(seed + 77);
  Case c = random_case(seed, chance.one_of({1, 2, 3, 5}));
  c.options.way = Way::automatic;
  c.options.automatic.machine = machine;
  c.options.automatic.table = random_table(c, chance);
  return c;
}

LayerWeights common_of(const LayerSource& source, const Case& c) { return LayerWeights::common(source, c.placement); }

/// The fastest of a layer's candidates, worked out here.
Way best_of(const LayerSource& source, const Case& c, int max_tokens) {
  const TuningEntry& entry = c.options.automatic.table->entries().front();
  Way best = Way::automatic;
  double least = 0;
  for (const Way way : real_ways) {
    Case one = c;
    one.options.way = way;
    try {
      exchange_options(common_of(source, one), one.options);
    } catch (const InputError&) {
      continue;
    }
    const double us = *entry.us(way, std::max(1, max_tokens));
    if (best != Way::automatic && us >= least) continue;
    best = way;
    least = us;
  }
  return best;
}

/// A step for which that many of a case's ranks bring what they can, and others less or nothing.
Case random_step(const Case& c, Chance& chance) {
  Case step = c;
  step.tokens = random_split(chance, c.ranks(), chance.between(0, c.options.cap));
  return step;
}

TEST(LayerAuto, TheTablesBestWayOnAllRanksWithItsBits) {
  const std::uint64_t seed = announced_seed();
  std::set<Way> seen;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(40)) && !::testing::Test::HasFailure(); ++i) {
    const Case c = auto_case(seed + i);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    Chance chance(seed + i + 1000);
    constexpr std::size_t calls = 5;
    std::vector<Case> steps;
    std::vector<Tokens> batches;
    std::vector<Way> wanted;
    std::vector<std::vector<bf16>> outputs;
    for (std::size_t call = 0; call < calls; ++call) {
      steps.push_back(random_step(c, chance));
      batches.push_back(draw_tokens(steps.back(), chance.seed()));
      wanted.push_back(best_of(source, c, steps.back().most_tokens()));
      seen.insert(wanted.back());
      Case alone = steps.back();
      alone.options.way = wanted.back();
      outputs.push_back(run_layer(source, alone, batches.back()).outputs);
    }
    run_ranks(c.ranks(), {}, [&](Group& group) {
      LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
      const ExchangeMemory memory = layer_memory(weights, c.options);
      Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(weights, c.options));
      MoeLayer mine(workspace, memory, std::move(weights), c.options);
      for (std::size_t call = 0; call < calls; ++call) {
        const Step step = step_of(steps[call]);
        EXPECT_EQ(mine.explain(step).way, wanted[call]) << mine.explain(step).text();
        const std::vector<bf16> out = layer_test::call(steps[call], mine, batches[call], group.rank());
        EXPECT_EQ(mine.report().way, wanted[call]) << "on rank " << group.rank();
        EXPECT_EQ(different_bits(out, part_of(steps[call], outputs[call], group.rank())), 0u) << name(wanted[call]);
      }
      workspace.close();
    });
  }
  if (is_sanitized) return;
  EXPECT_EQ(seen.size(), real_ways.size()) << "some way was never chosen";
}

TEST(LayerAuto, SumsOfOneOrderKeepTheirBits) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(20)); ++i) {
    Case c = auto_case(seed + i);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    for (const SumOrder order : {SumOrder::slots, SumOrder::two_stages}) {
      c.options.automatic.sums = order;
      Case alone = c;
      alone.options.way = order == SumOrder::slots ? Way::low_latency : Way::one_sided;
      alone.options.reduce = Reduce::rank;
      EXPECT_EQ(different_bits(run_layer(source, c, tokens).outputs, run_layer(source, alone, tokens).outputs), 0u);
    }
  }
}

TEST(LayerAuto, TablesThatDifferAreRefusedByNameOnEveryRank) {
  const std::uint64_t seed = announced_seed();
  Case c = random_case(seed, 3);
  c.options.way = Way::automatic;
  c.options.automatic.machine = machine;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  Chance chance(seed);
  const auto table = random_table(c, chance), other = random_table(c, chance);
  run_ranks(3, {}, [&](Group& group) {
    LayerOptions options = c.options;
    options.automatic.table = group.rank() == 1 ? other : table;
    const LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
    const std::size_t bytes = layer_memory(weights, options).heap_bytes(3);
    try {
      Workspace workspace(group, bytes, describe(weights, options));
      ADD_FAILURE() << "two tables were accepted";
    } catch (const InputError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("tuning_table"), std::string::npos) << text;
      EXPECT_NE(text.find(other->fingerprint()), std::string::npos) << text;
    }
  });
}

TEST(LayerAuto, ItSaysWhatItLeavesOutAndWhy) {
  Case c = random_case(1, 2);
  c.layer.shape = {128, 128, 8, 2, {}};
  c.placement = Placement::contiguous(8, 2);
  c.options = {};
  c.options.way = Way::automatic;
  c.options.cap = 8;
  c.options.weight_at = WeightAt::combine;  // mega refuses it
  c.options.automatic.ways = {Way::gather, Way::mega};
  SyntheticLayer layer(c.layer);
  const LayerWeights weights = common_of(layer.source(), c);
  run_ranks(2, {}, [&](Group& group) {
    LayerWeights mine = LayerWeights::load(layer.source(), c.placement, group.rank());
    const ExchangeMemory memory = layer_memory(mine, c.options);
    Workspace workspace(group, memory.heap_bytes(2), describe(mine, c.options));
    const MoeLayer moe(workspace, memory, std::move(mine), c.options);
    const WayChoice choice = moe.explain({5, Phase::decode});
    EXPECT_EQ(choice.way, Way::gather);
    EXPECT_EQ(choice.times.size(), 1u);
    EXPECT_EQ(choice.refused.size(), 5u);
    EXPECT_NE(choice.text().find("weight_at"), std::string::npos) << choice.text();
    EXPECT_NE(choice.text().find("planner's model"), std::string::npos) << choice.text();
  });
  c.options.automatic.ways = {Way::mega};
  try {
    layer_memory(weights, c.options);
    ADD_FAILURE() << "no candidate was accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("weight_at"), std::string::npos) << error.what();
  }
}

LayerOptions auto_options() {
  LayerOptions options;
  options.way = Way::automatic;
  options.cap = 8;
  options.automatic.machine = machine;
  return options;
}

LayerWeights small_weights() {
  LayerWeights weights;
  weights.shape = {128, 128, 8, 2, {}};
  weights.kind = WeightKind::bf16;
  weights.placement = Placement::contiguous(8, 2);
  return weights;
}

/// Gather fastest, then low_latency.
std::shared_ptr<const TuningTable> gather_first() {
  auto table = std::make_shared<TuningTable>();
  const TuningKey key{machine, 128, 128, 8, 2, 2, WeightKind::bf16, Activation::bf16};
  table->add({key, "made up", {{4, {{Way::gather, 1.0}, {Way::low_latency, 2.0}, {Way::mega, 3.0}}}}});
  return table;
}

/// As gather by NCCL on GPUs.
TEST(LayerAuto, AWayThatCannotBeMadeIsLeftOutWithItsReason) {
  const LayerWeights weights = small_weights();
  LayerOptions options = auto_options();
  options.automatic.table = gather_first();
  const CandidateCheck no_gather = [](const ExchangeOptions& exchange) {
    return exchange.way == Way::gather ? fmt::format("a cap of {} is not liked", exchange.cap) : "";
  };
  const WayChooser all(weights, options, candidates_of(weights, options), "");
  const WayChooser others(weights, options, candidates_of(weights, options, Engine::host, no_gather), "");
  EXPECT_EQ(all.explain({4, Phase::decode}).way, Way::gather);
  EXPECT_EQ(others.explain({4, Phase::decode}).way, Way::low_latency);
  const std::string text = others.explain({4, Phase::decode}).text();
  EXPECT_NE(text.find("left out: a cap of 8 is not liked"), std::string::npos) << text;
  options.automatic.ways = {Way::gather};
  try {
    candidates_of(weights, options, Engine::host, no_gather);
    ADD_FAILURE() << "nothing is left";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("gather: a cap of 8 is not liked"), std::string::npos) << error.what();
  }
}

/// As gather by NCCL while a rank is masked.
TEST(LayerAuto, AWayThatCannotBeCalledNowIsLeftOutUntilItCan) {
  const LayerWeights weights = small_weights();
  LayerOptions options = auto_options();
  options.automatic.table = gather_first();
  options.automatic.ways = {Way::gather, Way::low_latency};
  WayChooser chooser(weights, options, candidates_of(weights, options), "");
  const auto picked = [&](std::span<const RefusedWay> not_now) {
    const Way way = chooser.options()[chooser.pick({4, Phase::decode}, not_now)].way;
    EXPECT_EQ(chooser.explain({4, Phase::decode}, not_now).way, way);
    return way;
  };
  const std::vector<RefusedWay> no_gather{{Way::gather, "rank 1 is masked"}};
  EXPECT_EQ(picked({}), Way::gather);
  EXPECT_EQ(picked(no_gather), Way::low_latency);
  EXPECT_NE(chooser.explain({4, Phase::decode}, no_gather).text().find("left out: rank 1 is masked"), std::string::npos);
  EXPECT_EQ(picked({}), Way::gather) << "what was picked meanwhile is not kept";
  const std::vector<RefusedWay> none{{Way::gather, "masked"}, {Way::low_latency, "masked, too"}};
  EXPECT_EQ(picked(none), Way::gather) << "which then says itself what is wrong";
}

// How mega puts its results is mega's alone: it leaves other ways what they are, and takes mega out where bits are to be the same.
TEST(LayerAuto, AddedResultsAreMegasAlone) {
  LayerOptions options = auto_options();
  options.combine = Combine::add;
  for (const SumOrder sums : {SumOrder::any, SumOrder::slots, SumOrder::two_stages}) {
    options.automatic.sums = sums;
    const Candidates candidates = candidates_of(small_weights(), options);
    bool has_mega = false;
    for (const LayerOptions& one : candidates.options) {
      has_mega = has_mega || one.way == Way::mega;
      EXPECT_EQ(one.combine, one.way == Way::mega ? Combine::add : Combine::slots) << name(one.way);
    }
    EXPECT_EQ(has_mega, sums == SumOrder::any);
    EXPECT_FALSE(candidates.options.empty());
  }
}

/// Bytes of a workspace before there is one, for layers of all ways in it and one of way auto.
TEST(LayerAuto, AWorkspacesBytesAreKnownBeforeItIsMade) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(8)); ++i) {
    Chance chance(seed + i);
    const int ranks = chance.between(1, 3);
    std::vector<Case> cases;
    std::vector<std::unique_ptr<SyntheticLayer>> drawn;
    std::vector<LayerSource> sources;
    for (std::size_t n = 0; n < 4; ++n) {
      cases.push_back(random_case(seed + i + 10 * n, ranks));
      if (n > 0) cases.back().take(host_routes[(seed + i + n) % std::size(host_routes)]);
      if (n == 0) cases.back().options.way = Way::automatic;
      drawn.push_back(std::make_unique<SyntheticLayer>(cases.back().layer));
      sources.push_back(source_of(*drawn.back(), cases.back()));
    }
    std::vector<ContextLayer> layers;
    for (std::size_t n = 0; n < cases.size(); ++n) layers.push_back({&sources[n], cases[n].placement, cases[n].options});
    const ContextPlan plan = plan_context(layers);
    run_ranks(ranks, {}, [&](Group& group) {
      Workspace workspace(group, plan.heap_bytes, plan.configuration);
      EXPECT_EQ(workspace.bytes(), plan.heap_bytes);
      std::vector<MoeLayer> made;
      for (std::size_t n = 0; n < cases.size(); ++n)
        made.emplace_back(workspace, plan.memory, LayerWeights::load(sources[n], cases[n].placement, group.rank()),
                          cases[n].options);
      for (std::size_t n = 0; n < cases.size(); ++n) call(cases[n], made[n], draw_tokens(cases[n], seed), group.rank());
      EXPECT_EQ(workspace.bytes(), plan.heap_bytes) << "layers and calls take no more";
      workspace.close();
    });
  }
}

TEST(LayerAuto, TheLayersOwnRouterChoosesAsOneOutside) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(8)); ++i) {
    Case c = auto_case(seed + i);
    c.missing = 0;
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    LayerSource source = source_of(layer, c);
    RouterOptions router;
    router.topk = c.layer.shape.topk;
    const LayerShape& shape = c.layer.shape;
    Tokens tokens = draw_tokens(c, c.seed);
    const auto logits = router_logits(tokens.hidden, layer.router_weights(), c.all_tokens(), shape.hidden, shape.experts);
    tokens.routing = route(logits, layer.router_bias(), c.all_tokens(), shape.experts, router);
    const std::vector<bf16> outside = run_layer(source, c, tokens).outputs;
    run_ranks(c.ranks(), {}, [&](Group& group) {
      LayerWeights weights = LayerWeights::load(source, c.placement, group.rank());
      weights.router = {layer.router_weights(), layer.router_bias(), router};
      const ExchangeMemory memory = layer_memory(weights, c.options);
      Workspace workspace(group, memory.heap_bytes(c.ranks()), describe(weights, c.options));
      MoeLayer mine(workspace, memory, std::move(weights), c.options);
      const LayerInput input = input_of(c, tokens, group.rank());
      std::vector<bf16> out(static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(shape.hidden), untouched);
      mine.forward(input.tokens, input.hidden, step_of(c), out.data());
      EXPECT_EQ(different_bits(out, part_of(c, outside, group.rank())), 0u) << "rank " << group.rank();
      EXPECT_EQ(mine.routing().tokens, input.tokens);
      workspace.close();
    });
  }
}

TEST(LayerAuto, ARouterThatDoesNotFitIsRefusedWhenTheLayerIsMade) {
  Case c = random_case(3, 1);
  SyntheticLayer layer(c.layer);
  const auto make = [&](const std::optional<LayerRouter>& router, bool call) {
    std::string said;
    run_ranks(1, {}, [&](Group& group) {
      LayerWeights weights = LayerWeights::load(layer.source(), c.placement, 0);
      weights.router = router;
      const ExchangeMemory memory = layer_memory(weights, c.options);
      Workspace workspace(group, memory.heap_bytes(1), describe(weights, c.options));
      try {
        MoeLayer mine(workspace, memory, std::move(weights), c.options);
        if (call) mine.forward(0, nullptr, {0, Phase::decode}, nullptr);
      } catch (const InputError& error) {
        said = error.what();
      }
      workspace.close();
    });
    return said;
  };
  RouterOptions router;
  router.topk = c.layer.shape.topk;
  EXPECT_NE(make(std::nullopt, true).find("no router"), std::string::npos);
  EXPECT_EQ(make(LayerRouter{layer.router_weights(), {}, router}, true), "");
  EXPECT_NE(make(LayerRouter{std::span<const float>(layer.router_weights()).subspan(1), {}, router}, false).find("weights"),
            std::string::npos);
  router.topk += 1;
  EXPECT_NE(make(LayerRouter{layer.router_weights(), {}, router}, false).find("chooses"), std::string::npos);
}

}  // namespace
}  // namespace heddle::layer_test
