// What must agree bit for bit (docs/numerics.md): batch compositions, runners, placements, ways, shared experts alone and
// fused, tensor-parallel attention, workers.
#include <functional>

#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

constexpr std::uint64_t other_stream = 1000000007;  ///< what a test draws beside the case itself

/// Case n of a test: random, on one of a few numbers of ranks, by a way of `routes`.
template <std::size_t n>
Case nth_case(std::uint64_t seed, const Route (&routes)[n]) {
  Case c = random_case(seed, Chance(seed + other_stream).one_of({1, 2, 3, 5, 8}));
  c.take(routes[seed % n]);
  return c;
}

/// Calls the layer as `variant` says; the outputs must be `base`, bit for bit.
void expect_bits(SyntheticLayer& layer, const Case& variant, const Tokens& tokens, const std::vector<bf16>& base) {
  SCOPED_TRACE(text_of(variant));
  EXPECT_EQ(different_bits(run_layer(source_of(layer, variant), variant, tokens).outputs, base), 0u);
}

/// Random cases by the ways of `routes`: none of the variants of a case may change a bit of its outputs.
template <std::size_t n>
void expect_no_difference(const Route (&routes)[n], int cases,
                          const std::function<std::vector<Case>(Case&, Chance&)>& variants_of) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(cases)) && !::testing::Test::HasFailure(); ++i) {
    Case c = nth_case(seed + i, routes);
    Chance chance(seed + i + 2 * other_stream);
    const std::vector<Case> variants = variants_of(c, chance);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const Tokens tokens = draw_tokens(c, c.seed);
    const std::vector<bf16> base = run_layer(source_of(layer, c), c, tokens).outputs;
    for (const Case& variant : variants) expect_bits(layer, variant, tokens, base);
  }
}

TEST(LayerAgreement, TheSameCallTwice) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(48)); ++i) {
    const Case c = nth_case(seed + i, host_routes);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    const Tokens tokens = draw_tokens(c, c.seed);
    const Outcome once = run_layer(source_of(layer, c), c, tokens, 3);
    expect_bits(layer, c, tokens, once.outputs);  // in a group of its own
  }
}

/// Other tokens, and other numbers of them, for all ranks but one.
Tokens with_others(const Case& c, const Tokens& tokens, Case& other, int rank, Chance& chance) {
  other = c;
  other.tokens = random_split(chance, c.ranks(), c.options.cap);
  other.tokens[static_cast<std::size_t>(rank)] = c.tokens[static_cast<std::size_t>(rank)];
  Tokens mixed = draw_tokens(other, chance.seed());
  const LayerInput own = input_of(c, tokens, rank);
  const auto first = static_cast<std::ptrdiff_t>(other.first(rank));
  const auto pairs = static_cast<std::ptrdiff_t>(own.tokens) * c.layer.shape.topk;
  std::copy_n(own.hidden, static_cast<std::ptrdiff_t>(own.tokens) * c.layer.shape.hidden,
              mixed.hidden.begin() + first * c.layer.shape.hidden);
  std::copy_n(own.ids, pairs, mixed.routing.ids.begin() + first * c.layer.shape.topk);
  std::copy_n(own.weights, pairs, mixed.routing.weights.begin() + first * c.layer.shape.topk);
  return mixed;
}

TEST(LayerAgreement, WhateverTheOtherRanksBring) {
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(60)); ++i) {
    const Case c = nth_case(seed + i, host_routes);
    SCOPED_TRACE(text_of(c));
    SyntheticLayer layer(c.layer);
    Chance chance(c.seed);
    const Tokens tokens = draw_tokens(c, c.seed);
    const int rank = chance.between(0, c.ranks() - 1);
    const std::vector<bf16> before = part_of(c, run_layer(source_of(layer, c), c, tokens).outputs, rank);
    Case other;
    const Tokens mixed = with_others(c, tokens, other, rank, chance);
    const std::vector<bf16> after = part_of(other, run_layer(source_of(layer, other), other, mixed).outputs, rank);
    EXPECT_EQ(different_bits(after, before), 0u) << "rank " << rank;
  }
}

constexpr RunnerKind all_runners[] = {RunnerKind::contiguous, RunnerKind::masked, RunnerKind::routed};

TEST(LayerAgreement, Runners) {
  constexpr Route routes[] = {{Way::normal, Reduce::rank}, {Way::elastic, Reduce::rank}, {Way::elastic, Reduce::home}};
  expect_no_difference(routes, 48, [](Case& c, Chance&) {
    c.options.runner = RunnerKind::contiguous;
    std::vector<Case> variants(2, c);
    variants[0].options.runner = RunnerKind::masked;
    variants[1].options.runner = RunnerKind::routed;
    return variants;
  });
}

/// With slots not even the number of ranks matters, nor where experts and tokens are.
TEST(LayerAgreement, SlotsOnAnyRanksAndPlacement) {
  expect_no_difference(slot_routes, 36, [](Case& c, Chance& chance) {
    std::vector<Case> variants;
    for (const int ranks : {1, 2, 3, 8}) {
      for (const Route& route : slot_routes) {
        if (route.way == Way::mega && !fits_mega(c.options)) continue;
        Case v = c;
        v.take(route);
        v.options.runner = random_runner(chance, route.way);
        v.options.cap = std::max(1, c.all_tokens());
        v.tokens.assign(static_cast<std::size_t>(ranks), 0);
        for (int left = c.all_tokens(); left > 0; --left) ++v.tokens[static_cast<std::size_t>(chance.between(0, ranks - 1))];
        v.placement = random_placement(chance, c.layer.shape.experts, ranks);
        variants.push_back(v);
      }
    }
    return variants;
  });
}

/// Ways that sum in two stages, each in all its modes, on the same ranks with the same placement.
TEST(LayerAgreement, WaysOfTwoStages) {
  expect_no_difference(two_stage_routes, 40, [](Case& c, Chance&) {
    std::vector<Case> variants;
    for (const Route& route : two_stage_routes) {
      Case v = c;
      v.take(route);
      if (route.way == Way::gather) {
        for (const GatherMode mode : {GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled}) {
          v.options.gather = mode;
          variants.push_back(v);
        }
        make_tensor_parallel(v);
        variants.push_back(v);
      } else if (route.way == Way::one_sided) {
        variants.push_back(v);
      } else {
        for (const RunnerKind runner : all_runners) {
          v.options.runner = runner;
          v.options.cpu_sync = runner != RunnerKind::masked;
          variants.push_back(v);
        }
      }
    }
    return variants;
  });
}

TEST(LayerAgreement, SharedExpertAloneAndFused) {
  expect_no_difference(host_routes, 60, [](Case& c, Chance& chance) {
    if (!c.layer.shared_kind) c.layer.shared_kind = c.layer.kind;
    c.layer.shared_intermediate = c.layer.shape.intermediate;
    c.options.runner = random_runner(chance, c.options.way);
    if (chance.one_in(3)) make_tensor_parallel(c);
    std::vector<Case> variants(1, c);
    variants[0].options.shared = SharedMode::fused;
    return variants;
  });
}

TEST(LayerAgreement, TensorParallelAttentionOnAndOff) {
  expect_no_difference(host_routes, 60, [](Case& c, Chance&) {
    std::vector<Case> variants(1, c);
    make_tensor_parallel(variants[0]);
    return variants;
  });
}

TEST(LayerAgreement, OneAndThreeWorkersARank) {
  expect_no_difference(host_routes, 48, [](Case& c, Chance& chance) {
    c.options.workers = 1;
    c.options.runner = random_runner(chance, c.options.way);
    if (chance.one_in(4)) make_tensor_parallel(c);
    std::vector<Case> variants(1, c);
    variants[0].options.workers = 3;
    return variants;
  });
}

TEST(LayerAgreement, ElasticWithAndWithoutTheHostWaiting) {
  constexpr Route routes[] = {{Way::elastic, Reduce::rank}, {Way::elastic, Reduce::home}};
  expect_no_difference(routes, 32, [](Case& c, Chance& chance) {
    c.options.runner = random_runner(chance, Way::elastic);
    c.options.cpu_sync = false;
    std::vector<Case> variants(1, c);
    variants[0].options.cpu_sync = true;
    return variants;
  });
}

}  // namespace
}  // namespace heddle::layer_test
