// What becomes of results in the fused layer's kernel: slots in the format of every combine wire, bit for bit the slots chain with
// that wire on the same GPUs; and results that are added where they arrive, whose order is not fixed.
#include "gpu/mega_bed.hpp"

namespace heddle::layer_test {
namespace {

constexpr Wire quantised_wires[] = {Wire::fp8, Wire::nvfp4};

/// Either shape of row blocks, batches of its size and of a few tokens.
void expect_equal_in_both_row_blocks(Case c) {
  for (const DeviceRowBlocks blocks : {DeviceRowBlocks::small, DeviceRowBlocks::medium, DeviceRowBlocks::large}) {
    c.options.cap = 200;
    c.tokens.assign(static_cast<std::size_t>(c.ranks()), 200);
    c.tokens.back() = 67;
    DeviceLayerOptions device;
    device.row_blocks = blocks;
    SCOPED_TRACE(text_of(c));
    MegaBed bed(c, std::chrono::seconds(30), device);
    bed.expect_equal(c);
    Case few = c;
    few.tokens.assign(static_cast<std::size_t>(c.ranks()), 0);
    few.tokens.back() = 3;
    bed.expect_equal(few);
  }
}

TEST(MegaCombineGpu, SlotsOfEveryWireHaveTheBitsOfTheChain) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const Wire wire : quantised_wires) {
      for (const ScaleFormat scale : {ScaleFormat::ue8m0, ScaleFormat::f32}) {
        for (const int hidden : {64, 448, 576, 1024}) {  // tiles of one to four slabs, groups of 128 that are short
          Case c = fused_case(2, kind);
          c.layer.shape.hidden = hidden;
          c.options.combine_wire = wire;
          c.options.quantisation.scale = scale;
          expect_equal_in_both_row_blocks(c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Its results never travel, so they are added as bf16, last.
TEST(MegaCombineGpu, SharedExpertsStayBf16) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const Wire wire : quantised_wires) {
      for (const WeightKind shared : {kind, WeightKind::fp8_block, WeightKind::bf16}) {
        if (needs_fp8(shared) && !needs_fp8(kind)) continue;
        Case c = with_shared(fused_case(4, kind), shared, shared == WeightKind::bf16);
        c.options.combine_wire = wire;
        expect_equal_in_both_row_blocks(c);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(MegaCombineGpu, ManyRanks) {
  SKIP_WITHOUT_GPU();
  for (const int ranks : {1, 8, 16}) {
    for (const Wire wire : quantised_wires) {
      Case c = fused_case(ranks, WeightKind::mxfp4);
      c.options.combine_wire = wire;
      expect_equal_to_the_chain(c);
      if (HasFailure()) return;
    }
  }
}

TEST(MegaCombineGpu, OutliersAndInfinities) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const Wire wire : quantised_wires) {
      Case c = fused_case(2, kind);
      c.hidden_states = HiddenStates::heavy_tailed;
      c.options.combine_wire = wire;
      MegaBed bed(c);
      Tokens tokens = draw_tokens(c, 5);
      bed.expect_equal(c, tokens);
      tokens.hidden[static_cast<std::size_t>(c.layer.shape.hidden) + 3] = to_bf16(std::numeric_limits<float>::infinity());
      bed.expect_equal(c, tokens);
      if (HasFailure()) return;
    }
  }
}

Case with_added_results(Case c) {
  c.options.combine = Combine::add;
  return c;
}

// One sum of two rounded once is the same in any order.
TEST(MegaCombineGpu, UpToTwoAddedResultsHaveTheBitsOfSlots) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const int topk : {1, 2}) {
      for (const int ranks : {1, 2, 5}) {
        Case c = with_added_results(fused_case(ranks, kind));
        c.layer.shape.topk = topk;
        if (topk == 1) c = with_shared(c, kind, true);
        expect_equal_in_both_row_blocks(c);
        if (HasFailure()) return;
      }
    }
  }
}

// Of more, every addition rounds: the error against slots is that of the roundings, and it is there.
TEST(MegaCombineGpu, ManyAddedResultsDifferByTheirRoundings) {
  SKIP_WITHOUT_GPU();
  for (const WeightKind kind : fused_kinds) {
    for (const DeviceRowBlocks blocks : {DeviceRowBlocks::small, DeviceRowBlocks::medium, DeviceRowBlocks::large}) {
      Case c = with_added_results(with_shared(fused_case(4, kind), kind, false));
      c.options.cap = 300;
      c.tokens = {300, 211, 300, 64};
      DeviceLayerOptions device;
      device.row_blocks = blocks;
      SCOPED_TRACE(text_of(c));
      MegaBed bed(c, std::chrono::seconds(30), device);
      const Tokens tokens = draw_tokens(c, 5);
      const std::vector<bf16> slots = bed.chain(c, tokens);
      for (int call = 0; call < 3; ++call) {
        const double error = compare(bed.call(0, c, tokens), slots).relative_error;
        std::printf("  call %d: error %.2e against slots\n", call, error);
        EXPECT_LE(error, error_of_additions(c.layer.shape.topk));
        EXPECT_GT(error, 0.0);
      }
      if (HasFailure()) return;
    }
  }
}

// Layers of all kinds of combine in one workspace, in turn: none disturbs what another one finds.
TEST(MegaCombineGpu, LayersTakeTurnsInOneWorkspace) {
  SKIP_WITHOUT_GPU();
  Case c = fused_case(4, WeightKind::mxfp4);
  c.layer.shape.topk = 2;
  Case added = with_added_results(c);
  MegaBed bed({c, added});
  for (std::uint64_t seed = 1; seed <= 12 && !HasFailure(); ++seed) bed.expect_equal(another_batch(c, c.options.cap, seed));
}

}  // namespace
}  // namespace heddle::layer_test
