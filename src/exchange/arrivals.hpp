// The arriving side that ways share: routing turned into this rank's local ids, rows laid out by
// expert (the copy epilogue of elastic, the regrouping of normal), and the first stage of a two-stage sum.
#pragma once

#include <cstdint>
#include <cstring>

#include "exchange/sending.hpp"

namespace heddle {

/// Routing of n arrived rows in ordinary memory: local ids (-1: foreign or none) and weights, [n, topk].
struct ArrivedRouting {
  int topk = 1;
  std::int32_t* local_ids = nullptr;
  float* weights = nullptr;
};

/// Takes one row's routing (k ids, then k weights) out of the heap; null marks padding.
template <Worker W>
HEDDLE_PROTOCOL void take_routing(W& w, const ArrivedRouting& to, std::size_t row, const std::byte* routing,
                                  const PlacementView& placement) {
  const auto k = static_cast<std::size_t>(to.topk);
  std::int32_t* ids = to.local_ids + row * k;
  float* weights = to.weights + row * k;
  if (routing == nullptr) {
    w.lanes(to.topk, [&](int choice) { ids[choice] = -1; });
    return;
  }
  w.complete(w.copy_bytes(ids, routing, k * sizeof(std::int32_t)));
  w.complete(w.copy_bytes(weights, routing + k * sizeof(std::int32_t), k * sizeof(float)));
  const int rank = w.heap().rank;
  w.lanes(to.topk, [&](int choice) {
    const std::int32_t id = ids[choice];
    ids[choice] = id >= 0 && placement.rank_of[id] == rank ? placement.local_index[id] : -1;
  });
}

/// Rows laid out by expert, in ordinary memory: one row for each pair of a row and a local expert.
struct ExpertLayout {
  int local_experts = 0;
  int alignment = 128;             ///< contiguous: an expert's run begins at a multiple of this
  int block_rows = 0;              ///< masked: an expert's block begins at expert * block_rows; 0: contiguous
  std::int32_t* begins = nullptr;  ///< [local experts]
  std::int32_t* counts = nullptr;  ///< [local experts]
  std::int32_t* places = nullptr;  ///< [n, topk]: row of each pair, -1: not here
  float* row_weights = nullptr;    ///< a row
  std::byte* rows = nullptr;       ///< a row, wire format
  std::int32_t* before = nullptr;  ///< GPUs only: [chunks of pairs, local experts]
};

/// Lays n arrived rows (row_of(i): their bytes) out by expert; inside an expert they keep their order.
template <Worker W, class RowOf>
HEDDLE_PROTOCOL bool expand_rows(W& w, int n, const ArrivedRouting& routing, const RowFormat& format, RowOf row_of,
                                 const ExpertLayout& to) {
  const int topk = routing.topk;
  for (int i = w.index(); i < n; i += w.count()) {
    w.lanes(topk, [&](int choice) { to.places[i * topk + choice] = -1; });
  }
  if (!w.team_barrier()) return false;
  const int pairs = n * topk;
  const int chunk = w.chunk(expert_numbering_chunk, pairs);
  const auto nothing = [](int, int, int) {};
  const auto wanted = [&](int pair, int e) { return routing.local_ids[pair] == e; };
  const auto found = [&](int pair, int, int number) { to.places[pair] = number; };
  if (!number_by_class(w, pairs, to.local_experts, chunk, to.before, to.counts, nothing, wanted, found)) return false;
  if (w.index() == 0) {
    w.lanes(to.local_experts, [&](int e) {
      const int aligned = (to.counts[e] + to.alignment - 1) / to.alignment * to.alignment;
      to.begins[e] = to.block_rows > 0 ? e * to.block_rows : aligned;
    });
    if (to.block_rows == 0) w.prefix_sums(to.local_experts, to.begins, 1);
  }
  if (!w.team_barrier()) return false;
  for (int i = w.index(); i < n; i += w.count()) {
    w.lanes(topk, [&](int choice) {
      const int pair = i * topk + choice;
      if (routing.local_ids[pair] < 0) return;
      const std::int32_t e = routing.local_ids[pair];
      to.places[pair] += to.begins[e] + (pairs > chunk ? to.before[pair / chunk * to.local_experts + e] : 0);
      to.row_weights[to.places[pair]] = routing.weights[pair];
    });
    for (int choice = 0; choice < topk; ++choice) {
      const std::int32_t place = to.places[i * topk + choice];
      if (place >= 0) w.copy_row(to.rows + static_cast<std::size_t>(place) * format.row_bytes(), row_of(i), format);
    }
  }
  w.complete_all();
  return w.team_barrier();
}

/// sums [n, H] = for each arrived row the sum of its pairs' results (by place) in choice order, rounded
/// to bf16: the first stage of a two-stage sum.
template <Worker W>
HEDDLE_PROTOCOL bool sum_pairs(W& w, int n, const ArrivedRouting& routing, const std::int32_t* places, const bf16* results,
                               int hidden, bool weighted, bf16* sums) {
  const RowFormat plain{Wire::bf16, hidden, {}, 1.0f};
  for (int i = w.index(); i < n; i += w.count()) {
    const auto term = [&](int choice) {
      const int pair = i * routing.topk + choice;
      if (places[pair] < 0) return SumTerm{};
      const bf16* result = results + static_cast<std::size_t>(places[pair]) * static_cast<std::size_t>(hidden);
      return SumTerm{reinterpret_cast<const std::byte*>(result), routing.weights[pair]};
    };
    w.reduce_rows(sums + static_cast<std::size_t>(i) * static_cast<std::size_t>(hidden), routing.topk, term,
                  SumFormat{plain, weighted}, LastTerm{});
  }
  return w.team_barrier();
}

}  // namespace heddle
