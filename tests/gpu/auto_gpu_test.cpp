// Way auto and split calls on GPUs: the table's way with its bits, fixed in a graph; one set of weights; passes that equal one
// call.
#include <set>

#include "gpu/communicators.hpp"
#include "gpu/layer_bed.hpp"
#include "layer_tables.hpp"

namespace heddle::layer_test {
namespace {

Case auto_case(int ranks, WeightKind kind, Chance& chance) {
  Case c = plain_case(ranks, kind);
  c.options.way = Way::automatic;
  c.options.automatic.machine = machine;
  c.options.automatic.table = random_table(c, chance);
  return c;
}

TEST(AutoGpu, TheTablesWayWithItsBitsOnEveryGpu) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  Chance chance(seed);
  std::set<Way> seen;
  for (const int ranks : {1, 2, 4}) {
    for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::fp8_block, WeightKind::bf16, WeightKind::nvfp4}) {
      for (const bool shared : {false, true}) {
        Case c = auto_case(ranks, kind, chance);
        if (shared) c = with_shared(c, kind, chance.one_in(2));
        SyntheticLayer layer(c.layer);
        const LayerSource source = source_of(layer, c);
        LayerBed bed({{&source, &c}});
        for (int call = 0; call < 4; ++call) {
          c.tokens = random_split(chance, ranks, chance.between(0, c.options.cap));
          SCOPED_TRACE(text_of(c));
          const Tokens tokens = draw_tokens(c, chance.seed());
          bed.load(c, tokens);
          const WayChoice choice = bed.layer(0, 0).explain(step_of(c));
          const std::vector<bf16> out = bed.call(c);
          for (std::size_t gpu = 0; gpu < bed.workspace().gpus(); ++gpu)
            EXPECT_EQ(bed.layer(0, gpu).way(), choice.way) << "GPU " << gpu << ": " << choice.text();
          seen.insert(choice.way);
          Case alone = c;
          alone.options.way = choice.way;
          LayerBed other({{&source, &alone}});
          other.load(alone, tokens);
          EXPECT_EQ(different_bits(out, other.call(alone)), 0u) << name(choice.way);
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_EQ(seen.count(Way::normal), 0u) << "its host waits";
  EXPECT_EQ(seen.size(), real_ways.size() - 1) << "some way was never chosen";
}

TEST(AutoGpu, AGraphGoesTheWayOfItsCapture) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  Chance chance(seed);
  for (int round = 0; round < 6; ++round) {
    Case c = auto_case(2, WeightKind::mxfp4, chance);
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    LayerBed bed({{&source, &c}});
    const Step most{c.options.cap, Phase::decode};
    const LayerGraphs graphs = bed.capture(most);
    const Way captured = bed.layer(0, 0).way();
    EXPECT_EQ(captured, bed.layer(0, 0).explain(most).way);
    Case alone = c;
    alone.options.way = captured;
    LayerBed other({{&source, &alone}});
    for (int call = 0; call < 3; ++call) {
      c.tokens = random_split(chance, 2, c.options.cap);
      alone.tokens = c.tokens;
      SCOPED_TRACE(text_of(c));
      const Tokens tokens = draw_tokens(c, chance.seed());
      bed.load(c, tokens);
      bed.call(c);  // of its own step, perhaps another way in between
      bed.load(c, tokens);
      const std::vector<bf16> replayed = bed.replay(graphs, c);
      other.load(alone, tokens);
      EXPECT_EQ(different_bits(replayed, other.call(alone)), 0u) << name(captured);
      if (HasFailure()) return;
    }
  }
}

TEST(AutoGpu, WeightsAreInMemoryOnce) {
  SKIP_WITHOUT_GPU();
  Chance chance(1);
  for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::bf16}) {
    const Case c = with_shared(auto_case(2, kind, chance), kind, false);
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    Case alone = c;
    alone.options.way = Way::low_latency;
    const std::size_t all = LayerBed({{&source, &c}}).layer(0, 0).weight_bytes();
    EXPECT_EQ(all, LayerBed({{&source, &alone}}).layer(0, 0).weight_bytes());
    alone.options.way = Way::mega;
    EXPECT_EQ(all, LayerBed({{&source, &alone}}).layer(0, 0).weight_bytes());
  }
}

TEST(AutoGpu, WhatIsLeftOutIsToldWithTheReason) {
  SKIP_WITHOUT_GPU();
  Chance chance(1);
  const Case c = auto_case(1, WeightKind::nvfp4, chance);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  LayerBed bed({{&source, &c}});
  const std::string text = bed.layer(0, 0).explain({1, Phase::decode}).text();
  EXPECT_NE(text.find("normal"), std::string::npos) << text;
  EXPECT_NE(text.find("captured"), std::string::npos) << text;
  EXPECT_NE(text.find("mxfp4, fp8 block and bf16"), std::string::npos) << text;
}

TEST(AutoGpu, GatherIsLeftOutWhereNcclCannotServeIt) {
  COMMUNICATORS_OR_SKIP(nccl, 1);
  DeviceLayerOptions device;
  device.exchange.nccl = nccl;
  Chance chance(announced_seed());
  Case c = auto_case(1, WeightKind::mxfp4, chance);
  c.options.combine_wire = Wire::fp8;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  LayerBed bed({{&source, &c}}, device);
  for (int tokens = 1; tokens <= c.options.cap; ++tokens) {
    const WayChoice choice = bed.layer(0, 0).explain({tokens, Phase::decode});
    EXPECT_NE(choice.way, Way::gather);
    EXPECT_NE(choice.text().find("bf16 sums"), std::string::npos) << choice.text();
  }
  c.options.automatic.ways = {Way::gather};
  EXPECT_THROW(LayerBed({{&source, &c}}, device), InputError) << "nothing is left";
}

TEST(AutoGpu, GatherByNcclIsLeftOutWhileARankIsMasked) {
  if (gpus_here() < 2) GTEST_SKIP() << "two GPUs are needed, a rank each";
  COMMUNICATORS_OR_SKIP(nccl, 2);
  DeviceLayerOptions device;
  device.exchange.nccl = nccl;
  Chance chance(announced_seed());
  Case c = auto_case(2, WeightKind::mxfp4, chance);
  c.options.automatic.ways = {Way::gather, Way::one_sided};
  TuningTable table;
  table.add({key_of(c), "gather is fast", {{1, {{Way::gather, 1.0}, {Way::one_sided, 2.0}}}}});
  c.options.automatic.table = std::make_shared<TuningTable>(table);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  LayerBed bed({{&source, &c}}, device);
  const auto way = [&] { return bed.layer(0, 0).explain({1, Phase::decode}).way; };
  EXPECT_EQ(way(), Way::gather);
  bed.workspace().reset({true, false});
  EXPECT_EQ(way(), Way::one_sided);
  EXPECT_NE(bed.layer(0, 0).explain({1, Phase::decode}).text().find("rank 1 is masked"), std::string::npos);
  bed.workspace().reset({true, true});
  EXPECT_EQ(way(), Way::gather);
}

// ---- split calls --------------------------------------------------------------------------------------------

constexpr Route capturable_routes[] = {{Way::gather, Reduce::rank},  {Way::low_latency, Reduce::rank}, {Way::elastic, Reduce::rank},
                                       {Way::elastic, Reduce::home}, {Way::one_sided, Reduce::rank},   {Way::mega, Reduce::rank}};

Case split_of(const Case& c, Chance& chance) {
  Case split = c;
  split.options.overflow = Overflow::split;
  split.options.cap = chance.between(1, std::max(1, c.options.cap - 1));
  return split;
}

void expect_split_equals_whole(const Case& c, Chance& chance) {
  const Case split = split_of(c, chance);
  SCOPED_TRACE(text_of(split));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, chance.seed());
  LayerBed whole({{&source, &c}}), parts({{&source, &split}});
  whole.load(c, tokens);
  const std::vector<bf16> expected = whole.call(c);
  parts.load(split, tokens);
  EXPECT_EQ(different_bits(parts.call(split), expected), 0u);
  const int a_pass = split.options.cap * (split.options.tensor_parallel ? split.ranks() : 1);
  EXPECT_EQ(parts.layer(0, 0).passes(), std::max(1, (step_of(split).max_tokens + a_pass - 1) / a_pass));
  if (c.options.way == Way::normal || c.options.cpu_sync) return;
  const LayerGraphs graphs = parts.capture(step_of(split));
  parts.load(split, tokens);
  EXPECT_EQ(different_bits(parts.replay(graphs, split), expected), 0u) << "in a graph";
}

TEST(SplitGpu, EqualsTheCallWithALargerCap) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  Chance chance(seed);
  for (const Route& route : capturable_routes) {
    for (const int ranks : {1, 2, 4}) {
      for (const bool tensor_parallel : {false, true}) {
        Case c = with_shared(plain_case(ranks, WeightKind::mxfp4), WeightKind::mxfp4, chance.one_in(2));
        c.take(route);
        c.tokens = random_split(chance, ranks, c.options.cap);
        if (tensor_parallel) make_tensor_parallel(c);
        expect_split_equals_whole(c, chance);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(SplitGpu, ByAWayWhoseHostWaitsOnOneGpu) {
  SKIP_WITHOUT_GPU();
  Chance chance(announced_seed());
  Case c = plain_case(1, WeightKind::bf16);
  c.options.way = Way::normal;
  expect_split_equals_whole(c, chance);
  if (gpus_for(2) < 2) return;
  Case two = split_of(plain_case(2, WeightKind::bf16), chance);
  two.options.way = Way::normal;
  EXPECT_NE(refusal_of(two).find("a process a GPU"), std::string::npos);
}

TEST(SplitGpu, WithoutItMoreTokensThanTheCapAreRefused) {
  SKIP_WITHOUT_GPU();
  Case c = plain_case(1, WeightKind::bf16);
  const std::string text = refusal_of(c, [&](LayerBed& bed) { bed.begin(0, {c.options.cap + 1, Phase::decode}); });
  EXPECT_NE(text.find(std::to_string(c.options.cap + 1)), std::string::npos) << text;
}

}  // namespace
}  // namespace heddle::layer_test
