// The fused layer's kernel against the slots chain on the same GPUs, bit for bit: weight kinds, formats, ranks, shared experts,
// routings, batches, rings that wrap and row blocks of any size; and against the host engine.
#include "gpu/mega_bed.hpp"

#include <cstdio>
#include <filesystem>

namespace heddle::layer_test {
namespace {

/// Formats of activations and rows: bf16 has one, fp8 as many as there are groups and scales.
std::vector<Quantisation> quantisations_of(WeightKind kind) {
  if (!needs_fp8(kind)) return {Quantisation{}};
  std::vector<Quantisation> all;
  for (const int group : {128, 32}) {
    for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) all.push_back({group, scale});
  }
  return all;
}

TEST(MegaGpu, EveryKindAndFormatOnVirtualRanks) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2, 4, 8, 16}) {
    for (const WeightKind kind : fused_kinds) {
      for (const Quantisation& quantisation : quantisations_of(kind)) {
        Case c = fused_case(ranks, kind);
        c.options.quantisation = quantisation;
        expect_equal_to_the_chain(c);
        if (HasFailure()) return;
      }
    }
  }
}

// The same kind, any other one, of another width, gated; in either mode it runs inside.
TEST(MegaGpu, SharedExperts) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const WeightKind shared : all_kinds) {
      if (needs_fp8(shared) && !needs_fp8(kind)) continue;  // activations are bf16 throughout
      for (const bool gated : {false, true}) {
        Case c = with_shared(fused_case(4, kind), shared, gated);
        c.options.shared = gated ? SharedMode::fused : SharedMode::alone;
        if (!gated) c.layer.shared_intermediate = 192;
        expect_equal_to_the_chain(c);
        if (HasFailure()) return;
      }
    }
  }
}

// fp8 block weights beside mxfp4 ones, as DeepSeek-V4 has them: inside the kernel, by either of its row blocks; tiles of one to
// four slabs, and steps by odd and even numbers.
TEST(MegaGpu, Fp8SharedExpertsBesideMxfp4) {
  SKIP_WITHOUT_GPU();
  for (const DeviceRowBlocks blocks : {DeviceRowBlocks::small, DeviceRowBlocks::medium, DeviceRowBlocks::large}) {
    for (const Quantisation& quantisation : quantisations_of(WeightKind::mxfp4)) {
      for (const int hidden : {64, 448, 576}) {
        for (const int shared_intermediate : {64, 192, 320}) {
          Case c = with_shared(fused_case(2, WeightKind::mxfp4), WeightKind::fp8_block, false);
          c.layer.shape.hidden = hidden;
          c.layer.shared_intermediate = shared_intermediate;
          c.options.quantisation = quantisation;
          c.options.cap = 200;
          c.tokens = {200, 67};
          DeviceLayerOptions device;
          device.row_blocks = blocks;
          SCOPED_TRACE(text_of(c));
          MegaBed bed(c, std::chrono::seconds(30), device);
          EXPECT_EQ(bed.bed().layer(0, 0).buffer_bytes(), 0u) << "nothing runs outside of the kernel";
          bed.expect_equal(c);
          Case few = c;
          few.tokens = {0, 3};
          bed.expect_equal(few);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The same expert as a module before the kernel, which has buffers of its own.
TEST(MegaGpu, AModuleHasTheBitsOfASharedExpertInside) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : {WeightKind::mxfp4, WeightKind::fp8_block}) {
    const Case c = with_shared(fused_case(2, WeightKind::mxfp4), kind, false);
    DeviceLayerOptions outside;
    outside.shared_inside = false;
    MegaBed inside(c), module(c, std::chrono::seconds(30), outside);
    EXPECT_EQ(inside.bed().layer(0, 0).buffer_bytes(), 0u);
    EXPECT_GT(module.bed().layer(0, 0).buffer_bytes(), 0u);
    EXPECT_EQ(different_bits(module.expect_equal(c), inside.expect_equal(c)), 0u);
    if (HasFailure()) return;
  }
}

// The chain has no such expert, and the same bits with one alone.
TEST(MegaGpu, AnExtraExpertHasTheBitsOfASharedExpertInside) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 2, 8}) {
    for (const WeightKind kind : fused_kinds) {
      for (const bool many : {false, true}) {
        Case c = with_shared(fused_case(ranks, kind), kind, false);
        if (many) {
          c.options.cap = 2300;  // more pairs than a squad numbers alone
          c.tokens.assign(static_cast<std::size_t>(ranks), c.options.cap);
        }
        const Tokens tokens = draw_tokens(c, 5);
        MegaBed inside(c);
        const std::vector<bf16> wanted = inside.expect_equal(c, tokens);
        SyntheticLayer layer(c.layer);
        const LayerSource source = source_of(layer, c);
        c.options.shared = SharedMode::extra;
        SCOPED_TRACE(text_of(c));
        LayerBed extra({{&source, &c}});
        EXPECT_EQ(extra.layer(0, 0).buffer_bytes(), 0u) << "nothing runs outside of the kernel";
        for (int call = 0; call < 2; ++call) {
          extra.load(c, tokens);
          EXPECT_EQ(different_bits(extra.call(c), wanted), 0u);
        }
        if (HasFailure()) return;
      }
    }
  }
}

// An id beyond the layer's experts is a fault also where the kernel has more of them.
TEST(MegaGpu, AnExtraExpertIsNobodysChoice) {
  SKIP_WITHOUT_GPU();
  Case c = with_shared(fused_case(2, WeightKind::mxfp4), WeightKind::mxfp4, false);
  c.options.shared = SharedMode::extra;
  SyntheticLayer layer(c.layer);
  const LayerSource source = source_of(layer, c);
  LayerBed bed({{&source, &c}});
  Tokens tokens = draw_tokens(c, 5);
  tokens.routing.ids[1] = c.layer.shape.experts;
  bed.load(c, tokens);
  try {
    bed.call(c);
    ADD_FAILURE() << "nobody noticed";
  } catch (const FaultError& error) {
    EXPECT_EQ(error.fault().phase, "input check");
    EXPECT_EQ(error.fault().expected, static_cast<std::uint64_t>(c.layer.shape.experts));
  }
}

TEST(MegaGpu, AFusedSharedExpertHasTheBitsOfOneAlone) {
  SKIP_WITHOUT_GPU();
  Case c = with_shared(fused_case(2, WeightKind::mxfp4), WeightKind::mxfp4, true);
  const std::vector<bf16> alone = expect_equal_to_the_chain(c);
  c.options.shared = SharedMode::fused;
  EXPECT_EQ(different_bits(expect_equal_to_the_chain(c), alone), 0u);
}

TEST(MegaGpu, ClampsAndOutliers) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const float clamp : {0.5f, 10.0f}) {
      Case c = with_shared(fused_case(2, kind), kind, false);
      c.options.clamp = clamp;
      c.hidden_states = HiddenStates::heavy_tailed;
      expect_equal_to_the_chain(c);
      if (HasFailure()) return;
    }
  }
}

// Heads and widths of one part of a tile, of several, and of a tile and a bit.
TEST(MegaGpu, Sizes) {
  SKIP_WITHOUT_GPU();
  struct Size {
    int hidden, intermediate, experts, topk;
  };
  for (const Size& size : {Size{64, 64, 5, 2}, Size{192, 576, 9, 3}, Size{576, 192, 9, 3}, Size{1024, 512, 8, 8},
                           Size{2048, 1408, 4, 2}, Size{7168, 256, 4, 2}}) {
    for (const WeightKind kind : fused_kinds) {
      Case c = fused_case(2, kind);
      c.layer.shape = {size.hidden, size.intermediate, size.experts, size.topk, {}};
      c.placement = Placement::contiguous(size.experts, 2);
      c.options.cap = 150;
      c.tokens = {150, 61};
      expect_equal_to_the_chain(c);
      if (HasFailure()) return;
    }
  }
}

TEST(MegaGpu, EveryBatchUpToTheCap) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    Case c = with_shared(fused_case(2, kind), WeightKind::bf16, true);
    c.options.cap = 9;
    c.options.block_rows = 8;
    MegaBed bed(c);
    for (int mine = 0; mine <= 9; ++mine) {
      for (const int other : {0, 1, 8, 9}) {
        Case batch = c;
        batch.tokens = {mine, other};
        batch.seed = static_cast<std::uint64_t>(10 * mine + other);
        bed.expect_equal(batch);
      }
    }
    if (HasFailure()) return;
  }
}

TEST(MegaGpu, RanksWithoutExpertsOrTokens) {
  SKIP_WITHOUT_GPU();
  for (const bool has_shared : {false, true}) {
    Case c = fused_case(5, WeightKind::fp8_block);
    c.layer.shape.experts = c.layer.shape.topk = 2;  // on two of five ranks
    c.placement = Placement::contiguous(2, 5);
    if (has_shared) c = with_shared(c, WeightKind::mxfp4, true);
    MegaBed bed(c);
    for (const std::vector<int>& tokens : {std::vector<int>{0, 6, 3, 0, 1}, {0, 0, 0, 0, 0}, {24, 0, 0, 0, 0}, {2, 2, 2, 2, 2}}) {
      for (const double missing : {0.0, 1.0}) {  // 1: nobody chooses anything
        Case batch = c;
        batch.tokens = tokens;
        batch.missing = missing;
        bed.expect_equal(batch);
      }
    }
    if (HasFailure()) return;
  }
}

/// The batch of a case with another routing.
Tokens with_routing(const Case& c, Routing routing) {
  Tokens tokens = draw_tokens(c, c.seed);
  tokens.routing = std::move(routing);
  return tokens;
}

TEST(MegaGpu, AllTokensToAFewExperts) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    Case c = fused_case(4, kind);
    c.options.cap = 100;
    c.tokens = {100, 0, 37, 100};
    c.options.block_rows = 32;
    MegaBed bed(c);
    for (const int first : {0, 5, 9}) {  // four experts of one rank, or of two, get every row
      Popularity popularity(static_cast<std::size_t>(c.layer.shape.experts), 0.0);
      std::fill_n(popularity.begin() + first, 4, 1.0);
      bed.expect_equal(c, with_routing(c, draw_routing(popularity, {c.all_tokens(), c.layer.shape.topk, 3})));
    }
    for (int rank = 0; rank < 4; ++rank) {
      Case batch = c;
      batch.hot_rank = rank;
      batch.missing = 0;
      bed.expect_equal(batch);
    }
    if (HasFailure()) return;
  }
}

/// The folder of recorded routings above this program's own; empty where the program was carried away from it.
std::filesystem::path recordings() {
  for (auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path(); folder.has_relative_path();
       folder = folder.parent_path()) {
    if (exists(folder / "tests/data/routing")) return folder / "tests/data/routing";
  }
  return {};
}

// What a real router chose in decode steps, expanded to more experts, and of prompt tokens.
TEST(MegaGpu, RecordedRoutings) {
  SKIP_WITHOUT_GPU();
  if (recordings().empty()) GTEST_SKIP() << "no folder tests/data/routing above this program";
  struct Recorded {
    const char* file;
    int experts, topk, factor;
  };
  for (const Recorded& recorded : {Recorded{"gpt_oss_decode.ids.npy", 32, 4, 2}, Recorded{"esft_law.ids.npy", 64, 6, 1}}) {
    const Recording recording = Recording::open((recordings() / recorded.file).string());
    Case c = fused_case(8, WeightKind::mxfp4);
    c.layer.shape.experts = recorded.experts * recorded.factor;
    c.layer.shape.topk = recorded.topk;
    c.placement = Placement::contiguous(c.layer.shape.experts, 8);
    c.options.cap = 24;
    c.tokens = {24, 24, 0, 17, 24, 3, 24, 24};
    MegaBed bed(c);
    for (int layer = 0; layer < recording.layers(); ++layer)
      bed.expect_equal(c, with_routing(c, expand(recording.take(layer, 1, c.all_tokens()), recorded.factor)));
    if (HasFailure()) return;
  }
}

TEST(MegaGpu, RowBlocksOfEverySizeAndBothRings) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    const Case c = fused_case(2, kind);
    std::vector<Case> all;
    for (const int block_rows : {8, 32, 40, 96, 128, 256}) {
      for (const RingSize ring : {RingSize::live, RingSize::full}) all.push_back(with_ring(c, block_rows, ring));
    }
    for (Case& one : all) one.options.cap = 200;
    MegaBed bed(all);
    for (const std::vector<int>& tokens : {std::vector<int>{200, 133}, {1, 0}, {96, 97}}) {
      Case batch = all.front();
      batch.tokens = tokens;
      bed.expect_equal(batch);
    }
    if (HasFailure()) return;
  }
}

/// Row blocks of one rank's experts for a routing.
int row_blocks_of(const Case& c, const Tokens& tokens, int rank, int block_rows) {
  const RoutingLoad load = measure_load(tokens.routing, c.placement);
  int blocks = 0;
  for (const int expert : c.placement.experts_of(rank))
    blocks += parts_of(static_cast<int>(load.pairs_of_expert[static_cast<std::size_t>(expert)]), block_rows);
  return blocks;
}

// The smallest ring goes round many times, the full one never.
TEST(MegaGpu, ARingThatWrapsManyTimes) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    Case c = fused_case(2, kind);
    c.layer.shape.experts = c.layer.shape.topk = 2;  // an expert a rank, and every token goes to both
    c.placement = Placement::contiguous(2, 2);
    c.options.cap = 600;
    c.tokens = {600, 577};
    c.missing = 0;
    MegaBed bed({with_ring(c, 8, RingSize::live), with_ring(c, 32, RingSize::live), with_ring(c, 32, RingSize::full)});
    const Tokens tokens = draw_tokens(c, 7);
    for (const std::size_t number : {0, 1, 2}) {
      const MegaLayout layout = bed.layout(number);
      const int blocks = row_blocks_of(c, tokens, 0, layout.block_rows);
      std::printf("row blocks of %d: %d in a ring of %d, which goes round %.1f times\n", layout.block_rows, blocks,
                  layout.ring_blocks, static_cast<double>(blocks) / layout.ring_blocks);
      if (layout.ring_blocks < blocks) {
        EXPECT_GE(blocks, 7 * layout.ring_blocks) << "the ring is meant to wrap";
      }
      EXPECT_EQ(layout.ring_blocks >= blocks, number == 2) << "the full ring alone is meant not to wrap";
    }
    bed.expect_equal(c, tokens);
    if (HasFailure()) return;
  }
}

// The live ring of many experts and ranks, whose blocks wait for room while other ranks' rows come in any order.
TEST(MegaGpu, RingsOfManyExpertsWrap) {
  SKIP_WITHOUT_GPU();
  Case c = with_ring(fused_case(8, WeightKind::fp8_block), 8, RingSize::live);
  c.layer.shape.experts = 20;
  c.placement = Placement::contiguous(20, 8);
  c.options.cap = 130;
  c.tokens = {130, 128, 0, 130, 1, 77, 130, 130};
  MegaBed bed(c);
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    c.seed = seed;
    c.hot_rank = seed == 2 ? 5 : -1;
    const Tokens tokens = draw_tokens(c, c.seed);
    const int hottest = seed == 2 ? 5 : 0;
    EXPECT_GE(row_blocks_of(c, tokens, hottest, 8), 4 * bed.layout(0).ring_blocks) << "the ring is meant to wrap";
    bed.expect_equal(c, tokens);
  }
}

TEST(MegaGpu, RandomLayers) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(longer(80)) && !HasFailure(); ++i) {
    Chance chance(seed + i + 7);
    expect_equal_to_the_chain(random_fused_case(seed + i, chance.one_of({1, 2, 3, 4, 5, 8, 16})));
  }
}

TEST(MegaGpu, AgreesWithTheHostEngine) {
  SKIP_WITHOUT_GPU();
  const std::uint64_t seed = announced_seed();
  GpuBounds bounds;
  const auto expect_the_host_engines = [&bounds](const Case& c) {
    MegaBed bed(c);
    const Tokens tokens = draw_tokens(c, c.seed);
    bounds.expect(c, bed.call(0, c, tokens),
                  run_layer(bed.source(), with_ring(c, c.options.block_rows, c.options.ring), tokens).outputs);
  };
  for (const int ranks : {1, 4}) {
    for (const WeightKind kind : fused_kinds) expect_the_host_engines(with_shared(fused_case(ranks, kind), kind, true));
  }
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(longer(40)) && !HasFailure(); ++i) {
    Chance chance(seed + i + 7);
    expect_the_host_engines(random_fused_case(seed + i, chance.one_of({1, 2, 3, 5})));
  }
}

}  // namespace
}  // namespace heddle::layer_test
