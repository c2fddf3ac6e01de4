// Tensor-parallel experts on the host engine: slices of every expert on every rank give what whole experts give, and bit for bit
// what slices give that are experts of their own.
#include "layer/expert_slices.hpp"

#include "layer_support.hpp"
#include "reference/slices.hpp"

namespace heddle::layer_test {
namespace {

Case sliced_case(int ranks, WeightKind kind, int intermediate) {
  Case c;
  c.layer.shape = {192, intermediate, 7, 3, {}};
  c.layer.kind = kind;
  c.layer.seed = 11;
  c.placement = Placement::everywhere(7, ranks);
  c.options.way = Way::gather;
  c.options.expert_slices = true;
  c.options.cap = 9;
  for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(rank == 1 ? 0 : 9 - rank);
  return c;
}

TEST(LayerSlices, CoverAnExpertInPartsOf128) {
  for (const int intermediate : {128, 192, 1024, 2880, 18432}) {
    for (int ranks = 1; ranks <= (intermediate + 127) / 128; ++ranks) {
      int end = 0, least = intermediate, most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const SliceRange slice = slice_of_rank(intermediate, rank, ranks);
        EXPECT_EQ(slice.first, end) << "slice " << rank << " of " << ranks;
        EXPECT_EQ(slice.first % 128, 0);
        EXPECT_GT(slice.count, 0);
        end = slice.first + slice.count;
        least = std::min(least, slice.count);
        most = std::max(most, slice.count);
      }
      EXPECT_EQ(end, intermediate);
      EXPECT_LE(most - least, 128 + intermediate % 128) << "as even as parts of 128 allow";
    }
  }
}

/// The float64 reference, rounded where slices are.
std::vector<bf16> sliced_reference(const LayerSource& source, const Case& c, const Tokens& tokens) {
  std::vector<int> ends;
  for (int rank = 0; rank < c.ranks(); ++rank) {
    const SliceRange slice = slice_of_rank(source.shape.intermediate, rank, c.ranks());
    ends.push_back(slice.first + slice.count);
  }
  SlicesAsExperts slices(source.expert, ends, tokens.routing.ids, tokens.routing.weights, source.shape.experts);
  LayerSource many = source;
  many.shape.experts *= c.ranks();
  many.shape.topk *= c.ranks();
  many.expert = [&slices](int id) { return slices.expert(id); };
  Tokens chosen = tokens;
  chosen.routing.topk = many.shape.topk;
  chosen.routing.ids = slices.ids();
  chosen.routing.weights = slices.weights();
  Case of_parts = c;
  of_parts.placement = Placement::from_map(slices.rank_of(), c.ranks());
  return reference_of(many, of_parts, chosen);
}

TEST(LayerSlices, EverywhereIsOnEveryRank) {
  const Placement everywhere = Placement::everywhere(5, 3);
  EXPECT_TRUE(everywhere.is_everywhere());
  EXPECT_FALSE(Placement::contiguous(5, 3).is_everywhere());
  EXPECT_EQ(everywhere.ranks(), 3);
  EXPECT_EQ(everywhere.experts(), 5);
  EXPECT_EQ(everywhere.max_local_experts(), 5);
  for (int rank = 0; rank < 3; ++rank) {
    const auto experts = everywhere.experts_of(rank);
    EXPECT_EQ(std::vector<int>(experts.begin(), experts.end()), (std::vector<int>{0, 1, 2, 3, 4}));
  }
  for (int expert = 0; expert < 5; ++expert) EXPECT_EQ(everywhere.local_index(expert), expert);
}

TEST(LayerSlices, GiveTheReferencesOutputs) {
  const std::uint64_t seed = announced_seed();
  Bounds bounds;
  for (const WeightKind kind : all_kinds) {
    for (const int ranks : {1, 2, 3}) {
      for (const GatherMode mode : {GatherMode::padded, GatherMode::uneven, GatherMode::zero_filled, GatherMode::tensor_parallel}) {
        Case c = sliced_case(ranks, kind, 320);
        c.seed = seed;
        c.layer.shared_kind = kind;
        c.layer.shared_intermediate = 128;
        c.options.gather = mode;
        if (mode == GatherMode::tensor_parallel) make_tensor_parallel(c);
        SyntheticLayer layer(c.layer);
        const LayerSource source = source_of(layer, c);
        const Tokens tokens = draw_tokens(c, seed);
        bounds.expect(c, run_layer(source, c, tokens).outputs, sliced_reference(source, c, tokens));
      }
    }
  }
}

// Expert e's slice on rank r as expert e * ranks + r of a layer that has no slices, chosen whenever e is.
TEST(LayerSlices, HaveTheBitsOfExpertsOfTheirOwn) {
  const std::uint64_t seed = announced_seed();
  for (const WeightKind kind : all_kinds) {
    for (const int ranks : {2, 3}) {
      const Case c = sliced_case(ranks, kind, 128 * ranks);
      SyntheticLayer layer(c.layer);
      const LayerSource source = source_of(layer, c);
      const Tokens tokens = draw_tokens(c, seed);

      std::vector<ExpertWeights> experts;
      for (int e = 0; e < 7; ++e) experts.push_back(source.expert(e));
      std::vector<ExpertSlices> slices;
      std::vector<int> rank_of;
      for (int rank = 0; rank < ranks; ++rank) slices.emplace_back(experts, slice_of_rank(128 * ranks, rank, ranks));
      for (int e = 0; e < 7 * ranks; ++e) rank_of.push_back(e % ranks);
      Case many = c;
      many.options.expert_slices = false;
      many.layer.shape.intermediate = 128;
      many.layer.shape.experts = 7 * ranks;
      many.layer.shape.topk = 3 * ranks;
      many.placement = Placement::from_map(rank_of, ranks);
      LayerSource parts = source;
      parts.shape = many.layer.shape;
      parts.expert = [&](int id) {
        return slices[static_cast<std::size_t>(id % ranks)].views()[static_cast<std::size_t>(id / ranks)];
      };
      Tokens chosen = tokens;
      chosen.routing.topk = 3 * ranks;
      chosen.routing.ids.clear();
      chosen.routing.weights.clear();
      for (std::size_t pair = 0; pair < tokens.routing.ids.size(); ++pair) {
        for (int rank = 0; rank < ranks; ++rank) {
          const std::int32_t id = tokens.routing.ids[pair];
          chosen.routing.ids.push_back(id < 0 ? -1 : id * ranks + rank);
          chosen.routing.weights.push_back(tokens.routing.weights[pair]);
        }
      }
      EXPECT_EQ(different_bits(run_layer(source, c, tokens).outputs, run_layer(parts, many, chosen).outputs), 0u)
          << "kind " << static_cast<int>(kind) << ", " << ranks << " ranks";
    }
  }
}

TEST(LayerSlices, RefusedByName) {
  const auto refusal = [](const Case& c) -> std::string {
    SyntheticLayer layer(c.layer);
    try {
      exchange_options(LayerWeights::load(source_of(layer, c), c.placement, 0), c.options);
    } catch (const InputError& error) {
      return error.what();
    }
    return "nothing was refused";
  };
  const auto expect_part = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" should say \"" << part << "\"";
  };
  Case c = sliced_case(3, WeightKind::bf16, 256);
  expect_part(refusal(c), "at most 2 ranks are possible");
  c = sliced_case(2, WeightKind::bf16, 256);
  c.options.way = Way::low_latency;
  expect_part(refusal(c), "take gather");
  c = sliced_case(2, WeightKind::bf16, 256);
  c.placement = Placement::contiguous(7, 2);
  expect_part(refusal(c), "Placement::everywhere");
  c = sliced_case(2, WeightKind::bf16, 256);
  c.options.expert_slices = false;
  expect_part(refusal(c), "needs expert_slices");
  c = sliced_case(2, WeightKind::bf16, 256);
  c.layer.shared_kind = WeightKind::bf16;
  c.layer.shared_intermediate = 256;
  c.options.shared = SharedMode::fused;
  expect_part(refusal(c), "compute it alone");
}

}  // namespace
}  // namespace heddle::layer_test
