// Small layers under recovery, and what their survivors must compute: the outputs of a group that has only them.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "heddle/recovery.hpp"
#include "layer_support.hpp"

namespace heddle::layer_test {

inline Case recovery_case(int ranks, const Route& route, std::uint64_t seed) {
  Case c;
  c.layer.shape = {128, 64, 10, 3, {}};
  c.layer.kind = WeightKind::fp8_block;
  c.layer.seed = 11;
  c.placement = Placement::contiguous(10, ranks);
  c.options.cap = 5;
  for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back(rank == 1 ? 0 : 5 - rank % 3);
  c.seed = seed;
  c.take(route);
  return c;
}

/// The same layer on fewer ranks, as if the group had always been that small: live ranks are numbered anew.
inline Case smaller(const Case& c, const std::vector<bool>& live, const Placement& placement) {
  Case small = c;
  small.tokens.clear();
  std::vector<int> number(live.size(), -1);
  for (std::size_t rank = 0; rank < live.size(); ++rank) {
    if (!live[rank]) continue;
    number[rank] = static_cast<int>(small.tokens.size());
    small.tokens.push_back(c.tokens[rank]);
  }
  std::vector<int> rank_of;
  for (const int rank : placement.rank_map()) rank_of.push_back(number[static_cast<std::size_t>(rank)]);
  small.placement = Placement::from_map(rank_of, static_cast<int>(small.tokens.size()));
  return small;
}

/// Of the batch the tokens that live ranks bring.
inline Tokens tokens_of(const Case& c, const Tokens& tokens, const std::vector<bool>& live) {
  Tokens some;
  some.routing = {0, tokens.routing.topk, {}, {}};
  const auto hidden = static_cast<std::ptrdiff_t>(c.layer.shape.hidden);
  const auto topk = static_cast<std::ptrdiff_t>(c.layer.shape.topk);
  for (int rank = 0; rank < c.ranks(); ++rank) {
    if (!live[static_cast<std::size_t>(rank)]) continue;
    const std::ptrdiff_t first = c.first(rank), count = c.tokens[static_cast<std::size_t>(rank)];
    const auto append = [&](auto& to, const auto& from, std::ptrdiff_t size) {
      to.insert(to.end(), from.begin() + first * size, from.begin() + (first + count) * size);
    };
    append(some.hidden, tokens.hidden, hidden);
    append(some.routing.ids, tokens.routing.ids, topk);
    append(some.routing.weights, tokens.routing.weights, topk);
    some.routing.tokens += static_cast<int>(count);
  }
  return some;
}

/// A rank's outputs in a group of the live ones alone, computed by threads.
class Wanted {
 public:
  Wanted(const LayerSource& source, const Case& c) : source_(source), case_(c) {}
  /// Of the batch with that seed.
  std::vector<bf16> of(int rank, const std::vector<bool>& live, std::uint64_t batch) {
    auto& known = known_[{live, batch}];
    if (known.empty()) {
      const Placement placement = spread_over_survivors(case_.placement, live);
      const Case small = smaller(case_, live, placement);
      const Outcome outcome = run_layer(source_, small, tokens_of(case_, draw_tokens(case_, batch), live));
      int number = 0;
      for (std::size_t i = 0; i < live.size(); ++i) {
        known.push_back(live[i] ? part_of(small, outcome.outputs, number) : std::vector<bf16>());
        number += live[i] ? 1 : 0;
      }
    }
    return known[static_cast<std::size_t>(rank)];
  }

 private:
  const LayerSource& source_;
  const Case& case_;
  std::map<std::pair<std::vector<bool>, std::uint64_t>, std::vector<std::vector<bf16>>> known_;
};

}  // namespace heddle::layer_test
