// What the fused kernel for GPUs takes, asked on the host: one answer for the choice of a way, for the kernel's launch and for
// `heddle verify`, with what would be right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "heddle/layer.hpp"
#include "layer/candidates.hpp"
#include "layer/options.hpp"
#include "mega/kernel_limits.hpp"

namespace heddle {
namespace {

using ::testing::HasSubstr;

LayerWeights weights_of(WeightKind kind, int experts = 8, int ranks = 2) {
  LayerWeights weights;
  weights.shape = {128, 128, experts, 2, {}};
  weights.kind = kind;
  weights.placement = Placement::contiguous(experts, ranks);
  return weights;
}

LayerOptions mega_of(int cap = 8) {
  LayerOptions options;
  options.way = Way::mega;
  options.cap = cap;
  return options;
}

std::string refusal(const LayerWeights& weights, const LayerOptions& options) {
  return refused_by_kernel(exchange_options(weights, options), weights.kind);
}

TEST(MegaKernelLimits, EveryKindAsItIsByDefault) {
  for (const WeightKind kind : {WeightKind::bf16, WeightKind::fp8_block, WeightKind::mxfp4})
    EXPECT_EQ(refusal(weights_of(kind), mega_of()), "") << static_cast<int>(kind);
  EXPECT_THAT(refusal(weights_of(WeightKind::nvfp4), mega_of()), HasSubstr("nvfp4 weights have no fused kernel"));
  EXPECT_THAT(refusal(weights_of(WeightKind::mxfp8), mega_of()), HasSubstr("mxfp8 weights have no fused kernel"));
}

TEST(MegaKernelLimits, ActivationsAndWiresAreThoseOfTheWeights) {
  LayerOptions bf16 = mega_of();
  bf16.activation = Activation::bf16;
  EXPECT_THAT(refusal(weights_of(WeightKind::mxfp4), bf16), HasSubstr("fp8 activations"));
  EXPECT_EQ(refusal(weights_of(WeightKind::bf16), bf16), "");
  LayerOptions fp8 = mega_of();
  fp8.activation = Activation::fp8;
  EXPECT_THAT(refusal(weights_of(WeightKind::bf16), fp8), HasSubstr("bf16 activations"));
  LayerOptions wire = mega_of();
  wire.wire = Wire::nvfp4;
  EXPECT_THAT(refusal(weights_of(WeightKind::fp8_block), wire), HasSubstr("wire = fp8"));
  EXPECT_THAT(refusal(weights_of(WeightKind::bf16), wire), HasSubstr("wire = bf16"));
}

TEST(MegaKernelLimits, SharedExpertsOfAnotherKind) {
  EXPECT_TRUE(has_fused_kernel(WeightKind::mxfp4, WeightKind::fp8_block));
  EXPECT_FALSE(has_fused_kernel(WeightKind::fp8_block, WeightKind::mxfp4));
  EXPECT_FALSE(has_fused_kernel(WeightKind::mxfp4, WeightKind::bf16));
}

TEST(MegaKernelLimits, AsManyCountsAsACtaHolds) {
  constexpr int most = sm90::most_mega_counts / (2 + 3);  // local experts of two ranks
  EXPECT_EQ(refusal(weights_of(WeightKind::bf16, 2 * most), mega_of()), "");
  EXPECT_THAT(refusal(weights_of(WeightKind::bf16, 2 * most + 2), mega_of()), HasSubstr("take way = low_latency"));
}

TEST(MegaKernelLimits, AsManyRowsAsARankNumbers) {
  EXPECT_EQ(refusal(weights_of(WeightKind::bf16), mega_of(1 << 23)), "") << "2 ranks of 2^23 tokens to 2 experts are 2^25 rows";
  EXPECT_THAT(refusal(weights_of(WeightKind::bf16), mega_of((1 << 23) + 1)), HasSubstr("smaller cap"));
}

/// The choice of way auto on GPUs gives the same reason.
TEST(MegaKernelLimits, TheChoiceOfAWayGivesTheSameReason) {
  LayerWeights weights = weights_of(WeightKind::nvfp4);
  LayerOptions options = mega_of();
  options.way = Way::automatic;
  const auto reason_of = [&](Engine engine) {
    for (const RefusedWay& one : candidates_of(weights, options, engine).refused) {
      if (one.way == Way::mega) return one.reason;
    }
    return std::string();
  };
  EXPECT_EQ(reason_of(Engine::gpus), refusal(weights, mega_of()));
  EXPECT_EQ(reason_of(Engine::host), "");
  weights = weights_of(WeightKind::bf16, 2048);
  EXPECT_THAT(reason_of(Engine::gpus), HasSubstr("counts"));
}

}  // namespace
}  // namespace heddle
