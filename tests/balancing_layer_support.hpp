// Layers whose experts have copies: cases, what they must give, and a rank of one.
#pragma once

#include "balancing_support.hpp"
#include "heddle/balancing.hpp"
#include "layer_support.hpp"

namespace heddle::layer_test {

/// A case, and how many experts every rank holds.
struct BalancedCase {
  Case c;
  int places = 1;
  ReplicaMap first;
};

/// Cases that exchanges of all kinds are made for.
inline BalancedCase balanced_case(std::uint64_t seed, const Route& route, int ranks) {
  BalancedCase b;
  b.c = random_case(seed, ranks);
  Chance chance(seed + 77);
  LayerShape& shape = b.c.layer.shape;
  shape.experts = std::max(shape.experts, 2);
  shape.topk = std::min(shape.topk, shape.experts);
  b.c.placement = Placement::contiguous(shape.experts, ranks);
  b.c.take(route);
  b.c.options.runner = random_runner(chance, route.way);
  b.places = (shape.experts + ranks - 1) / ranks + chance.between(0, 2);
  std::mt19937_64 random(seed);
  b.first = balancing_test::random_map(random, shape.experts, ranks, b.places);
  return b;
}

/// The layer with copies as a static layer of physical experts.
inline Outcome run_physical(const LayerSource& source, const Case& c, const Tokens& tokens, const ReplicaMap& map, CopyRule rule) {
  Case physical = c;
  physical.layer.shape.experts = map.physical();
  physical.placement = map.placement();
  Tokens chosen = tokens;
  const std::vector<int> one_source{c.all_tokens()};
  if (c.options.tensor_parallel) {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(map.experts()));
    choose_copies(map, rule, 0, tokens.routing.ids, chosen.routing.ids, counts);
  } else {
    chosen.routing = choose_copies(map, rule, tokens.routing, c.tokens);
  }
  return run_layer(physical_source(source, map), physical, chosen);
}

/// What a rank of a balanced layer is made of.
struct OneBalanced {
  OneBalanced(Group& group, const LayerSource& source, const BalancedCase& b, const BalancingOptions& balancing) {
    const LayerWeights common = LayerWeights::common(physical_source(source, b.first), b.first.placement());
    const ExchangeMemory memory = layer_memory(common, b.c.options);
    workspace = std::make_unique<Workspace>(group, memory.heap_bytes(b.c.ranks()), describe(common, b.c.options));
    layer = std::make_unique<BalancedLayer>(*workspace, memory, source, b.first, b.c.options, balancing);
  }
  std::vector<bf16> call(const Case& c, const Tokens& tokens) {
    const LayerInput input = input_of(c, tokens, workspace->group().rank());
    std::vector<bf16> out(static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(c.layer.shape.hidden) + 1, untouched);
    layer->forward(input, step_of(c), out.data());
    EXPECT_EQ(out.back().bits, untouched.bits);
    out.pop_back();
    return out;
  }
  void close() {
    layer->close();
    workspace->close();
  }
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<BalancedLayer> layer;
};

}  // namespace heddle::layer_test
