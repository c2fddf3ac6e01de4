// The layer wholly on GPUs against the host engine's, which is held to the float64 reference: every way and runner, weight kinds,
// virtual ranks, the shared expert, and what has to agree bit for bit.
#include "gpu/layer_bed.hpp"

namespace heddle::layer_test {
namespace {

std::vector<RunnerKind> runners_of(Way way) {
  std::vector<RunnerKind> runners;
  for (const RunnerKind runner : {RunnerKind::contiguous, RunnerKind::masked, RunnerKind::routed}) {
    if (allows_layout(way, layout_of(way, runner))) runners.push_back(runner);
  }
  return runners;
}

/// On a GPU and on the host; twice on the GPU, with equal bits.
std::vector<bf16> expect_the_host_engines(const Case& c, GpuBounds& bounds, const DeviceLayerOptions& device = {}) {
  SCOPED_TRACE(text_of(c));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  const Tokens tokens = draw_tokens(c, c.seed);
  LayerBed bed({{&source, &c}}, device);
  bed.load(c, tokens);
  std::vector<bf16> first = bed.call(c);
  bounds.expect(c, first, run_layer(source, c, tokens).outputs);
  bed.load(c, tokens);
  EXPECT_EQ(different_bits(bed.call(c), first), 0u) << "the same call twice";
  return first;
}

TEST(DeviceLayerGpu, OneRank) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const WeightKind kind : all_kinds) {
    Case c = plain_case(1, kind);
    c.take(all_routes[0]);
    expect_the_host_engines(c, bounds);
    if (HasFailure()) return;
  }
}

// Bits of ways that sum in the same order agree whatever the runner; all against the host engine.
TEST(DeviceLayerGpu, EveryWayAndRunner) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const int ranks : {1, 2, 8}) {
    std::vector<bf16> family[2];
    for (const Route& route : all_routes) {
      for (const RunnerKind runner : runners_of(route.way)) {
        Case c = plain_case(ranks, WeightKind::mxfp4);
        c.take(route);
        c.options.runner = runner;
        const std::vector<bf16> out = expect_the_host_engines(c, bounds);
        std::vector<bf16>& others = family[sums_slots(c.options) ? 1 : 0];
        if (others.empty()) others = out;
        EXPECT_EQ(different_bits(out, others), 0u) << "against the first way that sums in the same order: " << text_of(c);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DeviceLayerGpu, SharedExpertAloneFusedAndGated) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const Route& route : all_routes) {
    for (const bool gated : {false, true}) {
      std::vector<bf16> alone;
      for (const SharedMode mode : {SharedMode::alone, SharedMode::fused}) {
        Case c = with_shared(plain_case(4, WeightKind::fp8_block), WeightKind::bf16, gated);
        c.take(route);
        c.options.shared = mode;
        const std::vector<bf16> out = expect_the_host_engines(c, bounds);
        if (alone.empty()) alone = out;
        EXPECT_EQ(different_bits(out, alone), 0u) << "fused against alone: " << text_of(c);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DeviceLayerGpu, ChainAndFusedActivationHaveEqualBits) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const WeightKind kind : {WeightKind::bf16, WeightKind::mxfp4}) {
    Case c = with_shared(plain_case(2, kind), kind, true);
    DeviceLayerOptions chain;
    chain.fused_activation = false;
    const std::vector<bf16> fused = expect_the_host_engines(c, bounds);
    EXPECT_EQ(different_bits(expect_the_host_engines(c, bounds, chain), fused), 0u) << "activation in a kernel of its own";
    chain.activation_grid = ActivationGrid::padded;
    EXPECT_EQ(different_bits(expect_the_host_engines(c, bounds, chain), fused), 0u) << "on a padded grid";
  }
}

// Rows that travel in a format that the products do not take are widened where they arrive.
TEST(DeviceLayerGpu, EveryWireAndActivation) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const Route& route : all_routes) {
    for (const RunnerKind runner : runners_of(route.way)) {
      for (const Wire wire : {Wire::bf16, Wire::fp8, Wire::nvfp4}) {
        for (const Activation activation : {Activation::fp8, Activation::bf16}) {
          Case c = plain_case(2, WeightKind::nvfp4);
          c.take(route);
          c.options.runner = runner;
          c.options.wire = wire;
          c.options.activation = activation;
          c.options.quantisation.scale = activation == Activation::fp8 ? ScaleFormat::ue8m0 : ScaleFormat::f32;
          expect_the_host_engines(c, bounds);
          if (HasFailure()) return;
        }
      }
    }
  }
}

/// Case n of a random series, by a way of all.
Case nth_case(std::uint64_t seed) {
  Chance chance(seed + 99);
  Case c = random_case(seed, chance.one_of({1, 2, 3, 5, 8}));
  c.take(all_routes[seed % std::size(all_routes)]);
  c.options.runner = random_runner(chance, c.options.way);
  if (chance.one_in(4)) make_tensor_parallel(c);
  const bool any_fp8 = needs_fp8(c.layer.kind) || (c.layer.shared_kind && needs_fp8(*c.layer.shared_kind));
  if (any_fp8) c.options.activation = Activation::fp8;
  return c;
}

TEST(DeviceLayerGpu, RandomLayers) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  GpuBounds bounds;
  const auto rounds = static_cast<std::uint64_t>(longer(120));
  std::uint64_t i = 0;
  for (; (i < rounds || !bounds.are_enough()) && i < 20 * rounds && !HasFailure(); ++i) {
    expect_the_host_engines(nth_case(seed + i), bounds);
  }
  EXPECT_TRUE(bounds.are_enough()) << i << " layers are too few to be held against the bounds of either activation and both wires";
}

TEST(DeviceLayerGpu, TensorParallelAttentionByEveryWay) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const Route& route : all_routes) {
    Case c = with_shared(plain_case(4, WeightKind::mxfp8), WeightKind::mxfp4, true);
    c.take(route);
    c.options.cpu_sync = c.options.way == Way::elastic;
    make_tensor_parallel(c);
    expect_the_host_engines(c, bounds);
    if (HasFailure()) return;
  }
}

/// Every rank holds a slice of every expert.
void slice_experts(Case& c) {
  c.options.way = Way::gather;
  c.options.expert_slices = true;
  c.options.shared = SharedMode::alone;
  c.placement = Placement::everywhere(c.layer.shape.experts, c.ranks());
}

TEST(DeviceLayerGpu, SlicesOfExperts) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const int ranks : {1, 2, 3}) {
    for (const WeightKind kind : all_kinds) {
      for (const bool tensor_parallel : {false, true}) {
        Case c = with_shared(plain_case(ranks, kind), kind, false);
        slice_experts(c);
        c.options.gather = ranks == 2 ? GatherMode::uneven : GatherMode::padded;
        if (tensor_parallel) make_tensor_parallel(c);
        expect_the_host_engines(c, bounds);
        if (HasFailure()) return;
      }
    }
  }
}

/// Another batch for the same layer: other tokens, routing and numbers, up to the cap.
Case another_batch(const Case& c, std::uint64_t seed) {
  Chance chance(seed);
  Case other = c;
  other.tokens = random_split(chance, c.ranks(), c.options.cap);
  if (c.options.tensor_parallel) other.tokens = c.tokens;  // the whole batch is the step's
  other.seed = seed;
  other.missing = chance.one_of({0.0, 0.1, 0.6});
  other.hot_rank = chance.one_in(3) ? chance.between(0, c.ranks() - 1) : -1;
  if (c.placement.is_everywhere()) other.hot_rank = -1;
  return other;
}

/// Graphs made for a cap's worth of tokens, replayed with other batches: the host engine's outputs, and the bits of an eager call.
void expect_replays(const Case& c, const std::vector<Case>& batches, GpuBounds& bounds) {
  SCOPED_TRACE(text_of(c));
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  LayerBed bed({{&source, &c}});
  const int most = c.options.tensor_parallel ? c.all_tokens() : c.options.cap;
  const LayerGraphs graphs = bed.capture({most, Phase::decode});
  for (const Case& batch : batches) {
    const Tokens tokens = draw_tokens(batch, batch.seed);
    bed.load(batch, tokens);
    const std::vector<bf16> replayed = bed.replay(graphs, batch);
    bounds.expect(batch, replayed, run_layer(source, batch, tokens).outputs);
    bed.load(batch, tokens);
    EXPECT_EQ(different_bits(bed.call(batch), replayed), 0u) << "captured against not captured: " << text_of(batch);
  }
}

TEST(DeviceLayerGpu, GraphsReplayWithOtherBatches) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  GpuBounds bounds;
  for (const bool tensor_parallel : {false, true}) {
    for (const Route& route : all_routes) {
      if (route.way == Way::normal) continue;
      for (const RunnerKind runner : runners_of(route.way)) {
        Case c = with_shared(plain_case(4, WeightKind::mxfp4), WeightKind::mxfp4, true);
        c.take(route);
        c.options.runner = runner;
        if (tensor_parallel) make_tensor_parallel(c);
        std::vector<Case> batches;
        for (std::uint64_t i = 0; i < 4; ++i) batches.push_back(another_batch(c, seed + i));
        expect_replays(c, batches, bounds);
        if (HasFailure()) return;
      }
    }
  }
  Case sliced = plain_case(2, WeightKind::fp8_block);
  slice_experts(sliced);
  expect_replays(sliced, {another_batch(sliced, seed), another_batch(sliced, seed + 1)}, bounds);
}

TEST(DeviceLayerGpu, TwoLayersInTurn) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  Case a = with_shared(plain_case(4, WeightKind::bf16), WeightKind::bf16, false);
  a.take({Way::low_latency, Reduce::rank});
  Case b = plain_case(4, WeightKind::fp8_block);
  b.layer.shape.intermediate = 192;
  b.layer.shape.experts = 30;
  b.layer.seed = 8;
  b.placement = Placement::contiguous(30, 4);
  b.take({Way::normal, Reduce::rank});
  SyntheticLayer layer_a(a.layer), layer_b(b.layer);
  const LayerSource source_a = source_of(layer_a, a), source_b = source_of(layer_b, b);
  LayerBed bed({{&source_a, &a}, {&source_b, &b}});
  for (std::uint64_t round = 0; round < 4; ++round) {
    const Tokens of_a = draw_tokens(a, 2 * round), of_b = draw_tokens(b, 2 * round + 1);
    bed.load(a, of_a);
    bounds.expect(a, bed.call(a, 0), run_layer(source_a, a, of_a).outputs);
    bed.load(b, of_b);
    bounds.expect(b, bed.call(b, 1), run_layer(source_b, b, of_b).outputs);
    if (HasFailure()) return;
  }
}

// A bad id ends the call on all ranks; after a reset the same layer is right.
TEST(DeviceLayerGpu, ABadIdIsAFaultAndAResetHeals) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const Route& route : all_routes) {
    for (const RunnerKind runner : runners_of(route.way)) {
      Case c = with_shared(plain_case(4, WeightKind::mxfp4), WeightKind::mxfp4, true);
      c.take(route);
      c.options.runner = runner;
      SCOPED_TRACE(text_of(c));
      SyntheticLayer layer(c.layer);
      const LayerSource source = source_of(layer, c);
      LayerBed bed({{&source, &c}}, {}, std::chrono::seconds(5));
      Tokens tokens = draw_tokens(c, 3);
      const std::vector<bf16> want = run_layer(source, c, tokens).outputs;
      Tokens bad = tokens;
      bad.routing.ids[static_cast<std::size_t>(c.first(2)) * 4 + 1] = c.layer.shape.experts;
      bed.load(c, bad);
      try {
        bed.call(c);
        ADD_FAILURE() << "id 13 of 13 experts was accepted";
      } catch (const FaultError& error) {
        EXPECT_EQ(error.fault().rank, 2) << error.what();
        EXPECT_EQ(error.fault().seen, 13u) << error.what();
      }
      bed.workspace().reset();
      bed.load(c, tokens);
      bounds.expect(c, bed.call(c), want);
      if (HasFailure()) return;
    }
  }
}

Tokens without_choices_of(int rank, const Case& c, Tokens tokens) {
  for (std::int32_t& id : tokens.routing.ids) id = id >= 0 && c.placement.rank_of(id) == rank ? -1 : id;
  return tokens;
}

// The host masks a rank that has no tokens of its own: its experts contribute nothing, nothing waits for it, and it comes back.
TEST(DeviceLayerGpu, MaskedRanksAreSkippedAndComeBack) {
  SKIP_WITHOUT_GPU();
  GpuBounds bounds;
  for (const Route& route : all_routes) {
    for (const RunnerKind runner : runners_of(route.way)) {
      Case c = with_shared(plain_case(4, WeightKind::mxfp4), WeightKind::mxfp4, true);
      ASSERT_EQ(c.tokens[1], 0);
      c.take(route);
      c.options.runner = runner;
      SCOPED_TRACE(text_of(c));
      SyntheticLayer layer(c.layer);
      const LayerSource source = source_of(layer, c);
      LayerBed bed({{&source, &c}});
      const Tokens tokens = draw_tokens(c, 3);
      bed.load(c, tokens);
      const std::vector<bf16> whole = bed.call(c);
      bounds.expect(c, whole, run_layer(source, c, tokens).outputs);
      const std::vector<bf16> want = run_layer(source, c, without_choices_of(1, c, tokens)).outputs;
      bed.workspace().reset({true, false, true, true});
      for (int call = 0; call < 2; ++call) {
        bed.load(c, tokens);
        bounds.expect(c, bed.call(c), want);
      }
      bed.workspace().reset({true, true, true, true});
      bed.load(c, tokens);
      EXPECT_EQ(different_bits(bed.call(c), whole), 0u) << "with all ranks again";
      if (HasFailure()) return;
    }
  }
}

// Products of so many tasks that a task wrong in some ten thousand is seen: kernels of large row blocks were right in every other
// test and had one (docs/performance.md, "Large row blocks were wrong now and then").
TEST(DeviceLayerGpu, ManyRowsHaveTheSameBitsCallAfterCall) {
  SKIP_WITHOUT_GPU();
  constexpr int calls = 60;
  for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::fp8_block}) {
    Case c = plain_case(1, kind);
    c.layer.shape = {4096, 2048, 16, 6, {}};
    c.placement = Placement::contiguous(c.layer.shape.experts, 1);
    c.options.cap = 8192;
    c.tokens = {8192};
    SyntheticLayer layer(c.layer);
    const LayerSource source = source_of(layer, c);
    const Tokens tokens = draw_tokens(c, c.seed);
    std::vector<bf16> first;
    for (const Way way : {Way::low_latency, Way::mega}) {
      c.take({way, Reduce::rank});
      LayerBed bed({{&source, &c}}, {});
      bed.load(c, tokens);
      for (int call = 0; call < calls; ++call) {
        const std::vector<bf16> out = bed.call(c);
        if (first.empty()) first = out;
        ASSERT_EQ(different_bits(out, first), 0u) << text_of(c) << ", call " << call;
      }
    }
  }
}

TEST(DeviceLayerGpu, RefusedByName) {
  SKIP_WITHOUT_GPU();
  const auto expect_part = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" should say \"" << part << "\"";
  };
  Case c = plain_case(2, WeightKind::mxfp4);
  c.options.activation = Activation::bf16;
  expect_part(refusal_of(c), "take fp8 activations");
  c = plain_case(2, WeightKind::bf16);
  expect_part(refusal_of(c, [](LayerBed& bed) { bed.begin(0, {1000, Phase::decode}); }), "the cap is 24");
  for (const Route& route : {Route{Way::normal, Reduce::rank}, Route{Way::elastic, Reduce::rank}}) {
    Case waits = with_shared(c, WeightKind::bf16, false);
    waits.take(route);
    waits.options.cpu_sync = true;
    expect_part(refusal_of(waits, [](LayerBed& bed) { bed.capture({24, Phase::decode}); }), "cannot be captured in a graph");
  }
  make_tensor_parallel(c);
  expect_part(refusal_of(c, [](LayerBed& bed) { bed.begin(0, {1000, Phase::decode}); }), "the cap is 24");
  expect_part(refusal_of(c, [](LayerBed& bed) { bed.layer(0, 0).begin({}, {1, Phase::decode}, nullptr); }), "0 inputs");
  expect_part(refusal_of(c, [](LayerBed& bed) { bed.layer(0, 0).seconds(); }), "was not timed");
}

TEST(DeviceLayerGpu, TimesOfTheParts) {
  SKIP_WITHOUT_GPU();
  const Case c = with_shared(plain_case(2, WeightKind::mxfp4), WeightKind::mxfp4, false);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  DeviceLayerOptions timed;
  timed.timed = true;
  LayerBed bed({{&source, &c}}, timed);
  bed.load(c, draw_tokens(c, 1));
  bed.call(c);
  const DeviceLayerSeconds seconds = bed.layer(0, 0).seconds();
  for (const double part : {seconds.dispatch, seconds.experts, seconds.shared, seconds.combine}) EXPECT_GT(part, 0.0);
  EXPECT_GT(bed.layer(0, 0).weight_bytes(), 0u);
  EXPECT_GT(bed.layer(0, 0).buffer_bytes(), 0u);
}

}  // namespace
}  // namespace heddle::layer_test
