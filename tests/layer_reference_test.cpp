// The layer by every way against the float64 reference, within the bounds of docs/numerics.md.
#include "layer_support.hpp"

namespace heddle::layer_test {
namespace {

/// What a call reports must follow from its routing.
void expect_counts(const Case& c, const Tokens& tokens, const Outcome& outcome) {
  const RoutingLoad load = measure_load(tokens.routing, c.placement);
  std::int64_t sent = 0;
  std::int64_t received = 0;
  std::int64_t real = 0;
  for (const LayerReport& report : outcome.reports) {
    sent += static_cast<std::int64_t>(report.rows_sent);
    received += static_cast<std::int64_t>(report.rows_received);
    real += static_cast<std::int64_t>(report.rows_real);
  }
  EXPECT_EQ(real, load.pairs);
  switch (c.options.way) {
    case Way::gather:
      EXPECT_EQ(received, static_cast<std::int64_t>(c.all_tokens()) * c.ranks());
      break;
    case Way::low_latency:
      EXPECT_EQ(sent, load.pairs);
      EXPECT_EQ(received, load.pairs);
      break;
    default:
      EXPECT_EQ(sent, load.copies);
      EXPECT_EQ(received, load.copies);
  }
}

void check(const Case& c, const LayerSource& source, Bounds& bounds) {
  SCOPED_TRACE(text_of(c));
  const Tokens tokens = draw_tokens(c, c.seed);
  const Outcome outcome = run_layer(source, c, tokens);
  bounds.expect(c, outcome.outputs, reference_of(source, c, tokens));
  expect_counts(c, tokens, outcome);
}

void check(const Case& c, Bounds& bounds) {
  SyntheticLayer layer(c.layer);
  check(c, source_of(layer, c), bounds);
}

TEST(LayerReference, RandomLayers) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rounds(90)) && !::testing::Test::HasFailure(); ++i) {
    Chance chance(seed + i + 1000000007);
    Case c = random_case(seed + i, chance.one_of({1, 2, 3, 8}));
    c.take(all_routes[(seed + i) % std::size(all_routes)]);
    c.options.runner = random_runner(chance, c.options.way);
    if (chance.one_in(5)) make_tensor_parallel(c);
    if (c.layer.shared_kind && c.layer.shared_intermediate == c.layer.shape.intermediate && chance.one_in(2)) {
      c.options.shared = SharedMode::fused;
    }
    check(c, bounds);
  }
}

/// A small case to vary: mxfp4, seven experts on three ranks.
Case plain_case(std::uint64_t seed, const Route& route) {
  Case c;
  c.seed = seed;
  c.layer.shape = {128, 128, 7, 3, std::nullopt};
  c.layer.kind = WeightKind::mxfp4;
  c.layer.seed = seed;
  c.placement = Placement::contiguous(7, 3);
  c.tokens = {12, 0, 17};
  c.options.cap = 17;
  c.take(route);
  return c;
}

TEST(LayerReference, HiddenSizesOfRealModels) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  int kind = 0;
  for (const int hidden : {640, 2304, 2880, 4096, 5120, 7168}) {
    Case c = plain_case(seed, {});
    c.layer.shape = {hidden, 64, 5, 3, std::nullopt};
    c.layer.kind = all_kinds[kind++ % 5];
    c.placement = Placement::contiguous(5, 2);
    c.tokens = {4, 7};
    c.options.cap = 8;
    SyntheticLayer layer(c.layer);
    for (const Route& route : all_routes) {
      if (is_sanitized && hidden > 2880 && route.way != Way::elastic) continue;
      c.take(route);
      check(c, layer.source(), bounds);
    }
  }
}

TEST(LayerReference, ManyRanks) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  for (const int ranks : {64, 72}) {
    for (const int experts : {40, 100}) {  // fewer than ranks, and more, but no multiple
      if (is_sanitized && (ranks == 72) == (experts == 40)) continue;
      Case c = plain_case(seed, {});
      c.layer.shape = {64, 64, experts, 6, std::nullopt};
      c.placement = Placement::contiguous(experts, ranks);
      c.tokens.clear();
      for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(rank % 4);
      c.options.cap = 3;
      SyntheticLayer layer(c.layer);
      for (const Route& route : all_routes) {
        c.take(route);
        check(c, layer.source(), bounds);
      }
    }
  }
}

TEST(LayerReference, ChoicesATokenFrom1To16) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  for (int topk = 1; topk <= 16; ++topk) {
    for (int i = 0; i < 2; ++i) {
      Case c = plain_case(seed, all_routes[(topk + 3 * i) % static_cast<int>(std::size(all_routes))]);
      c.layer.shape.experts = 16 + topk % 3;
      c.layer.shape.topk = topk;
      c.placement = Placement::contiguous(c.layer.shape.experts, 3);
      check(c, bounds);
    }
  }
}

TEST(LayerReference, SkewsAndEmptiness) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  SyntheticOptions with_shared = plain_case(seed, {}).layer;
  with_shared.shared_kind = WeightKind::fp8_block;
  with_shared.shared_intermediate = 192;
  SyntheticLayer layer(plain_case(seed, {}).layer);
  SyntheticLayer layer_with_shared(with_shared);
  for (const Route& route : all_routes) {
    Case c = plain_case(seed, route);
    c.hot_rank = 1;  // every choice as far as its experts reach
    check(c, layer.source(), bounds);
    c.hot_rank = -1;
    c.missing = 1.0;  // nobody chooses: zeros, or the shared expert alone
    check(c, layer.source(), bounds);
    check(c, layer_with_shared.source(), bounds);
    c.tokens = {0, 0, 0};
    check(c, layer.source(), bounds);
    c.missing = 0.0;
    c.tokens = {0, 0, 1};
    c.placement = Placement::from_map({0, 0, 0, 0, 0, 0, 0}, 3);  // two ranks have neither experts nor tokens
    check(c, layer_with_shared.source(), bounds);
  }
}

TEST(LayerReference, EveryWeightKindAndActivation) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  std::size_t route = 0;
  for (const WeightKind kind : all_kinds) {
    for (const Activation activation : {Activation::fp8, Activation::bf16}) {
      for (const int group : {128, 32}) {
        for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
          if (activation == Activation::bf16 && group == 32) continue;  // nothing is quantised
          Case c = plain_case(seed, all_routes[route++ % std::size(all_routes)]);
          c.layer.shape.hidden = 320;  // the last group is short
          c.layer.shape.intermediate = 192;
          c.layer.kind = kind;
          c.options.activation = activation;
          c.options.quantisation = {group, scale};
          c.options.clamp = 1.0f;
          check(c, bounds);
        }
      }
    }
  }
}

TEST(LayerReference, EveryWireThereAndBack) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  SyntheticLayer layer(plain_case(seed, {}).layer);
  for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
    for (const Wire combine_wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
      for (const WeightAt weight_at : {WeightAt::activation, WeightAt::combine}) {
        for (const Route& route : all_routes) {
          if (is_sanitized && (weight_at == WeightAt::combine) != (route.way == Way::elastic)) continue;
          Case c = plain_case(seed, route);
          c.options.wire = wire;
          c.options.combine_wire = combine_wire;
          c.options.weight_at = weight_at;
          check(c, layer.source(), bounds);
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle::layer_test
