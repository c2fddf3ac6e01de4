// What a layer's options default to, and what ranks must agree on before they share a layer.
#include <gtest/gtest.h>

#include "layer/synthetic.hpp"
#include "ranks.hpp"

namespace heddle {
namespace {

constexpr int ranks = 2;

LayerWeights weights_of(SyntheticLayer& layer, int rank, std::optional<float> clamp) {
  LayerSource source = layer.source();
  source.shape.clamp = clamp;
  return LayerWeights::load(source, Placement::contiguous(source.shape.experts, ranks), rank);
}

SyntheticOptions small_layer() {
  SyntheticOptions options;
  options.shape = {128, 64, 4, 2, {}};
  options.kind = WeightKind::mxfp4;
  options.seed = 5;
  return options;
}

LayerOptions options_with(std::optional<float> clamp) {
  LayerOptions options;
  options.way = Way::elastic;
  options.cap = 4;
  options.clamp = clamp;
  return options;
}

/// The outputs of four tokens on each rank.
std::vector<std::vector<bf16>> outputs(std::optional<float> of_shape, std::optional<float> asked) {
  std::vector<std::vector<bf16>> all(ranks);
  SyntheticLayer layer(small_layer());
  const std::vector<bf16> hidden = draw_hidden_states(4, 128, HiddenStates::heavy_tailed, 3);
  const std::vector<std::int32_t> ids{0, 1, 1, 2, 2, 3, 3, 0};
  const std::vector<float> weights(8, 0.5f);
  run_ranks(ranks, {}, [&](Group& group) {
    LayerWeights mine = weights_of(layer, group.rank(), of_shape);
    const LayerOptions options = options_with(asked);
    const ExchangeMemory memory = exchange_memory(exchange_options(mine, options));
    Workspace workspace(group, memory.heap_bytes(ranks), describe(mine, options));
    MoeLayer moe(workspace, memory, std::move(mine), options);
    auto& out = all[static_cast<std::size_t>(group.rank())];
    out.resize(4 * 128);
    moe.forward({4, hidden.data(), ids.data(), weights.data()}, {4, Phase::decode}, out.data());
  });
  return all;
}

bool same(const std::vector<std::vector<bf16>>& a, const std::vector<std::vector<bf16>>& b) {
  for (std::size_t r = 0; r < a.size(); ++r) {
    for (std::size_t i = 0; i < a[r].size(); ++i) {
      if (a[r][i].bits != b[r][i].bits) return false;
    }
  }
  return true;
}

TEST(LayerOptions, ClampIsTheModelsUnlessAsked) {
  const auto unclamped = outputs({}, {});
  const auto clamped = outputs({}, 0.25f);
  EXPECT_FALSE(same(unclamped, clamped)) << "the clamp has no effect on these inputs";
  EXPECT_TRUE(same(outputs(0.25f, {}), clamped));
  EXPECT_TRUE(same(outputs(7.0f, 0.25f), clamped));
}

TEST(LayerOptions, RanksMustAgreeOnTheArithmetic) {
  const auto refused = [](const LayerOptions& others, const std::string& difference) {
    SyntheticLayer layer(small_layer());
    run_ranks(ranks, {}, [&](Group& group) {
      const LayerWeights mine = weights_of(layer, group.rank(), {});
      const LayerOptions options = group.rank() == 1 ? others : options_with({});
      try {
        Workspace workspace(group, 1 << 20, describe(mine, options));
        ADD_FAILURE() << "rank " << group.rank() << " saw no difference in " << difference;
      } catch (const InputError& error) {
        EXPECT_NE(std::string(error.what()).find(difference), std::string::npos) << error.what();
      }
    });
  };
  refused(options_with(10.0f), "clamp=10");
  LayerOptions other = options_with({});
  other.activation = Activation::bf16;
  other.wire = Wire::fp8;
  refused(other, "activation=");
}

}  // namespace
}  // namespace heddle
