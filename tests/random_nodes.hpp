// Random cases of elastic over several nodes, for tests of one protocol or another.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "exchange_support.hpp"

namespace heddle {

/// One of some values.
class Picks {
 public:
  explicit Picks(std::mt19937_64& random) : random_(random) {}
  template <class T>
  T of(const std::vector<T>& values) {
    return values[random_() % values.size()];
  }
  template <class... T>
  auto operator()(T... values) {
    return of(std::vector<std::common_type_t<T...>>{values...});
  }
  int below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }

 private:
  std::mt19937_64& random_;
};

/// What sizes are picked from.
struct NodesSizes {
  std::vector<int> inside;  ///< ranks a node
  std::vector<int> experts, caps, hidden;
};

struct NodesCase {
  int nodes = 2;
  Case c;
};

inline NodesCase random_nodes_case(std::mt19937_64& random, const NodesSizes& sizes) {
  Picks pick(random);
  NodesCase drawn;
  drawn.nodes = pick(2, 2, 3, 4);
  const int ranks = drawn.nodes * pick.of(sizes.inside), experts = pick.of(sizes.experts), cap = pick.of(sizes.caps);
  Case& c = drawn.c;
  c.options = options_for(Way::elastic, pick.of(sizes.hidden), experts, ranks, 1 + pick.below(std::min(experts, 16)), cap);
  if (pick(0, 1) == 1) {
    std::vector<int> map;
    for (int e = 0; e < experts; ++e) map.push_back(pick.below(ranks));
    c.options.placement = Placement::from_map(map, ranks);
  }
  c.options.mode = pick(NodeMode::direct, NodeMode::hybrid);
  c.options.wire = pick(Wire::bf16, Wire::fp8, Wire::nvfp4);
  c.options.combine_wire = pick(Wire::bf16, Wire::bf16, Wire::fp8, Wire::nvfp4);
  c.options.weight_at = pick(WeightAt::activation, WeightAt::combine);
  c.options.arrived = pick(ArrivedLayout::contiguous, ArrivedLayout::masked, ArrivedLayout::routed);
  c.none = pick(0.0, 0.1, 0.6, 1.0);
  c.hot = pick(0, 0, 0, 1) == 1 ? pick.below(ranks) : -1;
  for (int r = 0; r < ranks; ++r) c.tokens.push_back(pick(0, 0, 1) == 1 ? cap : pick.below(cap + 1));
  if (pick(0, 0, 0, 1) == 1) c.tokens.assign(c.tokens.size(), 0);
  c.seed = random() % 100000;
  return drawn;
}

}  // namespace heddle
