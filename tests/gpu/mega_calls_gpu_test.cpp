// Calls of the fused layer one after the other: captured and replayed in any order, beside the chain and beside other layers in one
// workspace, under tensor-parallel attention, late everywhere, on a share of the SMs and beside another context. Every call has the
// bits of the chain alone.
#include <thread>

#include "gpu/mega_bed.hpp"

namespace heddle::layer_test {
namespace {

/// A layer captured for steps of some size.
struct Captured {
  LayerGraphs graphs;
  std::size_t number = 0;
  int step = 0;
};

/// Batches that fit a step, by turns; what they must give is found beforehand, not captured.
struct Batch {
  Case c;
  Tokens tokens;
  std::vector<bf16> wanted;
};

Batch draw_batch(MegaBed& bed, const Case& c, int most, std::uint64_t seed) {
  Batch batch{another_batch(c, most, seed), {}, {}};
  batch.tokens = draw_tokens(batch.c, seed);
  batch.wanted = bed.chain(batch.c, batch.tokens);
  return batch;
}

/// Graphs of fused layers and of their chain in any order, a burst of them now and then, uncaptured calls between them.
void replay_in_any_order(const std::vector<Case>& fused, const std::vector<int>& steps, std::uint64_t seed) {
  const Case& c = fused.front();
  SCOPED_TRACE(text_of(c));
  MegaBed bed(fused);
  std::vector<Captured> all;
  for (std::size_t number = 0; number <= bed.chain_number(); ++number) {
    for (const int step : steps) all.push_back({bed.bed().capture({step, Phase::decode}, number), number, step});
  }
  Chance chance(seed);
  for (int round = 0; round < longer(60) && !testing::Test::HasFailure(); ++round) {
    const Captured& next = all[static_cast<std::size_t>(chance.between(0, static_cast<int>(all.size()) - 1))];
    const Batch batch = draw_batch(bed, c, next.step, chance.seed());
    bed.bed().load(batch.c, batch.tokens);
    if (chance.one_in(3)) {
      for (const Captured& one : all) {
        if (one.step >= next.step) bed.bed().launch(one.graphs);
      }
    }
    const std::vector<bf16> replayed = bed.bed().replay(next.graphs, batch.c, next.number);
    EXPECT_EQ(different_bits(replayed, batch.wanted), 0u)
        << "layer " << next.number << " captured for " << next.step << " tokens, round " << round << ": " << text_of(batch.c);
    if (!chance.one_in(4)) continue;
    EXPECT_EQ(different_bits(bed.call(0, batch.c, batch.tokens), batch.wanted), 0u) << "not captured: " << text_of(batch.c);
  }
}

TEST(MegaCallsGpu, GraphsOfSeveralStepsInAnyOrder) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (const WeightKind kind : fused_kinds) {
    const Case c = with_shared(fused_case(4, kind), kind, true);
    replay_in_any_order({with_ring(c, 8, RingSize::live), with_ring(c, 128, RingSize::full)}, {1, 7, c.options.cap}, seed);
    if (HasFailure()) return;
  }
}

TEST(MegaCallsGpu, GraphsWithASharedExpertOfAnotherKind) {
  SKIP_WITHOUT_GPU();
  Case c = with_shared(fused_case(4, WeightKind::mxfp4), WeightKind::fp8_block, false);
  c.options.cap = 150;
  replay_in_any_order({with_ring(c, 8, RingSize::live), with_ring(c, 128, RingSize::full)}, {1, 7, c.options.cap},
                      announced_seed());
}

TEST(MegaCallsGpu, GraphsUnderTensorParallelAttention) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  Case c = with_shared(fused_case(4, WeightKind::mxfp4), WeightKind::bf16, false);
  make_tensor_parallel(c);
  replay_in_any_order({with_ring(c, 8, RingSize::live), with_ring(c, 32, RingSize::full)}, {c.all_tokens()}, seed);
}

TEST(MegaCallsGpu, TensorParallelAttentionGivesAllOutputsToAll) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 3, 8}) {
    for (const WeightKind kind : fused_kinds) {
      Case c = with_shared(fused_case(ranks, kind), WeightKind::bf16, true);
      const std::vector<bf16> apart = expect_equal_to_the_chain(c);
      make_tensor_parallel(c);
      EXPECT_EQ(different_bits(expect_equal_to_the_chain(c), apart), 0u) << "whoever the tokens belong to";
      c.tokens.assign(static_cast<std::size_t>(ranks), 0);
      c.tokens[0] = 1;  // slices without tokens on all ranks but one
      expect_equal_to_the_chain(c);
      if (HasFailure()) return;
    }
  }
}

/// Layers of one hidden size and k, each a fused one and its chain, and ways that pull from the areas that all of them share.
struct Mix {
  std::vector<Case> cases;
  std::vector<std::unique_ptr<SyntheticLayer>> layers;
  std::vector<LayerSource> sources;  ///< of cases 2 i and 2 i + 1 it is number i
  std::unique_ptr<LayerBed> bed;

  /// A layer and the layer that says what it must give.
  void add(const Case& c, const Case& alone) {
    layers.push_back(std::make_unique<SyntheticLayer>(c.layer));
    sources.push_back(source_of(*layers.back(), c));
    cases.push_back(c);
    cases.push_back(alone);
  }
  void open() {
    std::vector<LayerBed::Given> given;
    for (std::size_t i = 0; i < cases.size(); ++i) given.push_back({&sources[i / 2], &cases[i]});
    bed = std::make_unique<LayerBed>(given);
  }
  std::vector<bf16> call(std::size_t number, const Case& batch, const Tokens& tokens) const {
    bed->load(batch, tokens);
    return bed->call(batch, number);
  }
};

/// A layer of its own size in a workspace of several.
Case sized(int ranks, WeightKind kind, int intermediate, int experts, int cap) {
  Case c = fused_case(ranks, kind);
  c.layer.shape.intermediate = intermediate;
  c.layer.shape.experts = experts;
  c.layer.seed = static_cast<std::uint64_t>(intermediate + experts);
  c.placement = Placement::contiguous(experts, ranks);
  c.options.cap = cap;
  return c;
}

Mix mixed_layers(int ranks) {
  Mix mix;
  const auto add_fused = [&mix](const Case& c) { mix.add(c, chain_of(c)); };
  add_fused(with_ring(sized(ranks, WeightKind::mxfp4, 320, 13, 24), 8, RingSize::live));
  add_fused(with_ring(with_shared(sized(ranks, WeightKind::bf16, 192, 30, 60), WeightKind::bf16, true), 128, RingSize::live));
  add_fused(with_ring(with_shared(sized(ranks, WeightKind::fp8_block, 640, 4, 40), WeightKind::mxfp4, false), 16, RingSize::full));
  for (const Route& route :
       {Route{Way::gather, Reduce::rank}, Route{Way::one_sided, Reduce::rank}, Route{Way::elastic, Reduce::rank}}) {
    Case c = sized(ranks, WeightKind::mxfp4, 256, 17, 33);
    c.take(route);
    mix.add(c, c);
  }
  mix.open();
  return mix;
}

TEST(MegaCallsGpu, LayersAndWaysShareAWorkspace) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (const int ranks : {2, 4}) {
    const Mix mix = mixed_layers(ranks);
    Chance chance(seed);
    for (int round = 0; round < longer(60) && !HasFailure(); ++round) {
      const auto which = static_cast<std::size_t>(chance.between(0, static_cast<int>(mix.sources.size()) - 1));
      const Case& c = mix.cases[2 * which];
      const Case batch = another_batch(c, c.options.cap, chance.seed());
      const Tokens tokens = draw_tokens(batch, batch.seed);
      const std::vector<bf16> wanted = mix.call(2 * which + 1, batch, tokens);
      // Another layer in between, so that what a fused one finds in the workspace is seldom its own.
      const auto other = static_cast<std::size_t>(chance.between(0, static_cast<int>(mix.cases.size()) - 1));
      const Case between = another_batch(mix.cases[other], mix.cases[other].options.cap, chance.seed());
      mix.call(other, between, draw_tokens(between, between.seed));
      EXPECT_EQ(different_bits(mix.call(2 * which, batch, tokens), wanted), 0u) << "layer " << which << ": " << text_of(batch);
    }
  }
}

// Warps sleep before verbs, so that rows, tasks and words come in other orders.
TEST(MegaCallsGpu, DelaysBeforeEveryVerb) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (const WeightKind kind : fused_kinds) {
    const Case c = with_shared(fused_case(4, kind), kind, true);
    MegaBed bed({with_ring(c, 8, RingSize::live), with_ring(c, 32, RingSize::full)});
    std::vector<Batch> batches;
    for (std::uint64_t i = 0; i < 6; ++i) batches.push_back(draw_batch(bed, c, c.options.cap, seed + i));
    Chance chance(seed);
    for (int round = 0; round < longer(40) && !HasFailure(); ++round) {
      const auto longest = std::chrono::microseconds(chance.one_in(4) ? 60 : 15);
      bed.workspace().set_delays(longest, static_cast<std::uint32_t>(chance.seed()));
      const Batch& batch = batches[static_cast<std::size_t>(chance.between(0, 5))];
      const auto number = static_cast<std::size_t>(chance.between(0, 1));
      EXPECT_EQ(different_bits(bed.call(number, batch.c, batch.tokens), batch.wanted), 0u)
          << "layer " << number << ", round " << round << ": " << text_of(batch.c);
    }
    if (HasFailure()) return;
  }
}

// Rings that wrap while everybody is late.
TEST(MegaCallsGpu, DelaysWhereRingsWrap) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  Case c = with_ring(fused_case(2, WeightKind::mxfp4), 8, RingSize::live);
  c.layer.shape.experts = c.layer.shape.topk = 2;
  c.placement = Placement::contiguous(2, 2);
  c.options.cap = 200;
  c.tokens = {200, 187};
  MegaBed bed(c);
  const Tokens tokens = draw_tokens(c, seed);
  const std::vector<bf16> wanted = bed.chain(c, tokens);
  for (int round = 0; round < longer(12) && !HasFailure(); ++round) {
    bed.workspace().set_delays(std::chrono::microseconds(20), static_cast<std::uint32_t>(seed) + static_cast<std::uint32_t>(round));
    EXPECT_EQ(different_bits(bed.call(0, c, tokens), wanted), 0u) << "round " << round;
  }
}

DeviceLayerOptions on_sms(int sms) {
  DeviceLayerOptions device;
  device.exchange.sms = sms;
  return device;
}

// Few CTAs a rank, down to one: tasks stand behind each other in one line, and no launch overtakes the one before it.
TEST(MegaCallsGpu, AShareOfTheSms) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 4, 16}) {
    for (const WeightKind kind : fused_kinds) {
      const Case c = with_shared(fused_case(ranks, kind), kind, false);
      for (const int sms : {20, 40}) {
        SCOPED_TRACE(testing::Message() << sms << " SMs");
        MegaBed bed({with_ring(c, 8, RingSize::live), with_ring(c, 128, RingSize::live)}, std::chrono::seconds(30), on_sms(sms));
        bed.expect_equal(c);
        if (HasFailure()) return;
      }
    }
  }
}

// Each kernel, whatever the batch; all cut blocks that are larger than their tiles, the shared expert's as well.
TEST(MegaCallsGpu, EverySizeOfRowBlocks) {
  SKIP_WITHOUT_GPU();
  for (const DeviceRowBlocks blocks : {DeviceRowBlocks::small, DeviceRowBlocks::medium, DeviceRowBlocks::large}) {
    for (const WeightKind kind : fused_kinds) {
      SCOPED_TRACE(::testing::Message() << "size of row blocks " << static_cast<int>(blocks));
      Case c = with_shared(fused_case(4, kind), kind, false);
      c.options.cap = 150;
      c.tokens = {150, 0, 33, 1};
      DeviceLayerOptions device;
      device.row_blocks = blocks;
      MegaBed bed({with_ring(c, 256, RingSize::live), with_ring(c, 128, RingSize::full), with_ring(c, 72, RingSize::live),
                   with_ring(c, 8, RingSize::live)},
                  std::chrono::seconds(30), device);
      bed.expect_equal(c);
      bed.expect_equal(another_batch(c, 5, 11));
      if (HasFailure()) return;
    }
  }
}

// All rows of an expert are one block of the options' size and four of the kernel's; a CTA a rank takes the tasks in their order.
TEST(MegaCallsGpu, OneBlockThatIsCutIntoSeveral) {
  SKIP_WITHOUT_GPU();
  constexpr int ranks = 2;
  for (const WeightKind kind : fused_kinds) {
    Case c = fused_case(ranks, kind);
    c.layer.shape.experts = c.layer.shape.topk = ranks;
    c.placement = Placement::contiguous(ranks, ranks);
    c.options.cap = 64;
    c.tokens = {64, 64};
    c.missing = 0;
    DeviceLayerOptions device = on_sms(ranks / gpus_for(ranks));
    device.row_blocks = DeviceRowBlocks::small;
    MegaBed bed({with_ring(c, 128, RingSize::live), with_ring(c, 128, RingSize::full)}, std::chrono::seconds(10), device);
    bed.expect_equal(c);
    if (HasFailure()) return;
  }
}

/// A context of its own: a workspace, a stream a GPU, half of the SMs.
struct Context {
  MegaBed bed;
  std::vector<Batch> batches;
  std::vector<LayerGraphs> graphs;  ///< a layer
  std::string error;

  Context(const std::vector<Case>& fused, int sms, std::uint64_t seed) : bed(fused, std::chrono::seconds(30), on_sms(sms)) {
    const Case& c = fused.front();
    for (std::uint64_t i = 0; i < 5; ++i) batches.push_back(draw_batch(bed, c, c.options.cap, seed + i));
    for (std::size_t i = 0; i < fused.size(); ++i) graphs.push_back(bed.bed().capture({c.options.cap, Phase::decode}, i));
  }
  void fly(int rounds, std::uint64_t seed) {
    Chance chance(seed);
    for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
      const Batch& batch = batches[static_cast<std::size_t>(chance.between(0, static_cast<int>(batches.size()) - 1))];
      const auto number = static_cast<std::size_t>(chance.between(0, static_cast<int>(graphs.size()) - 1));
      bed.bed().load(batch.c, batch.tokens);
      const std::vector<bf16> out =
          chance.one_in(2) ? bed.bed().replay(graphs[number], batch.c, number) : bed.bed().call(batch.c, number);
      EXPECT_EQ(different_bits(out, batch.wanted), 0u) << "layer " << number << ", round " << round << ": " << text_of(batch.c);
    }
  }
  std::thread start(int rounds, std::uint64_t seed) {
    return std::thread([this, rounds, seed] {
      try {
        fly(rounds, seed);
      } catch (const std::exception& e) {
        error = e.what();
      }
    });
  }
};

// Nothing orders the kernels of one and of the other; with several GPUs each may begin with another one.
TEST(MegaCallsGpu, TwoContextsSideBySide) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "number of SMs");
  for (const int ranks : {2, 4}) {
    const Case one = with_shared(fused_case(ranks, WeightKind::mxfp4), WeightKind::mxfp4, false);
    const Case other = fused_case(ranks, WeightKind::bf16);
    Context first({with_ring(one, 8, RingSize::live), with_ring(one, 128, RingSize::full)}, sms / 2, seed);
    Context second({with_ring(other, 16, RingSize::live)}, sms / 2, seed + 10);
    std::thread flights[] = {first.start(longer(60), seed), second.start(longer(60), seed + 1)};
    for (std::thread& flight : flights) flight.join();
    EXPECT_EQ(first.error, "") << "the first context";
    EXPECT_EQ(second.error, "") << "the second context";
    if (HasFailure()) return;
  }
}

// Nothing is handed over in between, and nobody counts.
TEST(MegaCallsGpu, WhatArrivedStaysInside) {
  SKIP_WITHOUT_GPU();
  MegaBed bed(fused_case(2, WeightKind::mxfp4));
  bed.expect_equal(fused_case(2, WeightKind::mxfp4));
  const DeviceExchange& exchange = bed.bed().layer(0, 0).exchange();
  const Arrived arrived = exchange.arrived(0);
  EXPECT_EQ(arrived.rows, nullptr);
  EXPECT_EQ(arrived.received, -1);
  EXPECT_EQ(arrived.real, -1);
  EXPECT_FALSE(arrived.host_waited);
  EXPECT_THROW(exchange.counters(0), InputError);
  EXPECT_GT(bed.bed().layer(0, 0).weight_bytes(), 0u);
}

TEST(MegaCallsGpu, TimesOfACall) {
  SKIP_WITHOUT_GPU();
  const Case c = with_shared(fused_case(2, WeightKind::mxfp4), WeightKind::mxfp4, false);
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  DeviceLayerOptions timed;
  timed.timed = true;
  LayerBed bed({{&source, &c}}, timed);
  bed.load(c, draw_tokens(c, 1));
  bed.call(c);
  const DeviceLayerSeconds seconds = bed.layer(0, 0).seconds();
  EXPECT_GT(seconds.dispatch + seconds.experts + seconds.combine, 0.0);
}

}  // namespace
}  // namespace heddle::layer_test
