// The arriving side that ways share: routing turned into this rank's local ids, rows laid out by
// expert (the copy epilogue of elastic, the regrouping of normal), and the first stage of a two-stage sum.
#pragma once

#include <cstdint>

#include "exchange/sending.hpp"

namespace heddle {

/// Routing of n arrived rows in ordinary memory: local ids (-1: foreign or none) and weights, [n, topk].
struct ArrivedRouting {
  int topk = 1;
  std::int32_t* local_ids = nullptr;
  float* weights = nullptr;
};

/// Is told every local id that is listed, each by one lane, "no expert" too. Here nobody listens.
struct NotCounted {
  HEDDLE_HOST_DEVICE void operator()(std::int32_t) const {}
};

/// Takes one row's routing (k ids, then k weights) out of the heap.
template <Worker W, class Count = NotCounted>
HEDDLE_PROTOCOL void take_routing(W& w, const ArrivedRouting& to, std::size_t row, const std::byte* routing,
                                  const PlacementView& placement, const Count& count = {}) {
  const auto k = static_cast<std::size_t>(to.topk);
  std::int32_t* ids = to.local_ids + row * k;
  float* weights = to.weights + row * k;
  w.complete(w.copy_bytes(ids, routing, k * sizeof(std::int32_t)));
  w.complete(w.copy_bytes(weights, routing + k * sizeof(std::int32_t), k * sizeof(float)));
  const int rank = w.heap().rank;
  w.lanes(to.topk, [&](int choice) {
    ids[choice] = placement.local_id(ids[choice], rank);
    count(ids[choice]);
  });
}

/// Takes the routing of n rows, dealt over all workers; routing_of(row): where it lies in the heap, null for padding.
template <Worker W, class RoutingOf, class Count = NotCounted>
HEDDLE_PROTOCOL void list_routing(W& w, int n, RoutingOf routing_of, const PlacementView& placement, const ArrivedRouting& to,
                                  const Count& count = {}) {
  const int rank = w.heap().rank;
  const int k = to.topk;
  w.spread(n, k, [&](int row, int choice) {
    const std::byte* routing = routing_of(row);
    const int pair = row * k + choice;
    std::int32_t id = -1;
    float weight = 0;
    if (routing != nullptr) {
      id = w.load(reinterpret_cast<const std::int32_t*>(routing) + choice);
      weight = w.load(reinterpret_cast<const float*>(routing) + k + choice);
    }
    const std::int32_t local = placement.local_id(id, rank);
    to.local_ids[pair] = local;
    to.weights[pair] = weight;
    count(local);
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
  // What the pairs are numbered in: [n, topk] and [chunks of pairs, local experts].
  std::int32_t* numbers = nullptr;
  std::int32_t* before = nullptr;
};

/// begins[e] from counts [local experts], by one worker.
template <Worker W>
HEDDLE_PROTOCOL void begin_runs(W& w, const ExpertLayout& to, const std::int32_t* counts, std::int32_t* begins) {
  w.lanes(to.local_experts, [&](int e) {
    const int aligned = (counts[e] + to.alignment - 1) / to.alignment * to.alignment;
    begins[e] = to.block_rows > 0 ? e * to.block_rows : aligned;
  });
  if (to.block_rows == 0) w.prefix_sums(to.local_experts, begins, 1);
}

/// Numbers the pairs by expert and begins the runs; what this worker's squad may read of both.
struct ExpertRuns {
  const std::int32_t* numbers = nullptr;
  const std::int32_t* begins = nullptr;
};

/// Where a pair's row goes, if it does.
struct Place {
  std::int32_t row = -1;
  HEDDLE_HOST_DEVICE bool counts() const { return row >= 0; }
};

template <Worker W>
HEDDLE_PROTOCOL bool number_pairs(W& w, int pairs, const std::int32_t* local_ids, const ExpertLayout& to, ExpertRuns& runs) {
  Numbering memory{to.numbers, to.counts, to.before};
  std::int32_t* begins = to.begins;
  const int chunk = kinds_chunk(w, Crew::squad, pairs);
  const int experts = to.local_experts;
  const Crew crew = crew_for(w, pairs <= few_kinds, pairs + experts, experts, (pairs + chunk - 1) / chunk, memory);
  if (crew == Crew::squad) begins = memory.numbers + pairs;
  if (!number_kinds(
          w, crew, pairs, experts, [&](int pair) { return local_ids[pair]; }, memory))
    return false;
  if (crew_index(w, crew) == 0) {
    begin_runs(w, to, memory.totals, begins);
    if (crew == Crew::squad && w.first_squad()) {
      w.lanes(experts, [&](int e) {
        to.begins[e] = begins[e];
        to.counts[e] = memory.totals[e];
      });
    }
  }
  runs = {memory.numbers, begins};
  return crew_barrier(w, crew);
}

/// Lays n arrived rows of k pairs each out by expert; inside an expert they keep their order. local_ids [n, k] may be
/// this squad's own; row_of(i): a row's bytes, weights_of(i): where its k weights lie.
template <Worker W, class BytesOf, class WeightsOf>
HEDDLE_PROTOCOL bool expand_rows(W& w, int n, int k, const std::int32_t* local_ids, const RowFormat& format, BytesOf bytes_of,
                                 WeightsOf weights_of, const ExpertLayout& to) {
  ExpertRuns runs;
  if (!number_pairs(w, n * k, local_ids, to, runs)) return false;
  const auto place_of = [&](int pair) { return local_ids[pair] < 0 ? -1 : runs.begins[local_ids[pair]] + runs.numbers[pair]; };
  const int bits = w.part_bits(n, format.hidden);
  for (int item = w.index(); item < n << bits; item += w.count()) {
    const int i = row_of(item, bits);
    int n_places = k;
    const auto places = those_that_count(w, n_places, [&](int choice) { return Place{place_of(i * k + choice)}; });
    const auto row = [&](int j) {
      const std::int32_t place = places(j).row;
      return place < 0 ? nullptr : to.rows + static_cast<std::size_t>(place) * format.row_bytes();
    };
    copy_row(w, n_places, row, bytes_of(i), format, part_of(item, bits));
  }
  w.spread(n, k, [&](int i, int choice) {
    const std::int32_t place = place_of(i * k + choice);
    to.places[i * k + choice] = place;
    if (place >= 0) to.row_weights[place] = w.load(weights_of(i) + choice);
  });
  w.complete_all();
  return true;
}

/// The sum of one arrived row's pairs' results (by place) in choice order, rounded to bf16, to `out`: the first stage of
/// a two-stage sum.
template <Worker W>
HEDDLE_PROTOCOL void sum_pairs(W& w, int row, const ArrivedRouting& routing, const std::int32_t* places, const bf16* results,
                               int hidden, bool weighted, bf16* out, const RowPart& part = {}) {
  const RowFormat plain{Wire::bf16, hidden, {}, 1.0f};
  struct Pair {
    std::int32_t place = -1;
    float weight = 0;
    HEDDLE_HOST_DEVICE bool counts() const { return place >= 0; }
  };
  int n = routing.topk;
  const auto pairs = those_that_count(w, n, [&](int choice) {
    const int pair = row * routing.topk + choice;
    return Pair{places[pair], routing.weights[pair]};
  });
  const auto term = [&](int choice) {
    const Pair pair = pairs(choice);
    if (pair.place < 0) return SumTerm{};
    const bf16* result = results + static_cast<std::size_t>(pair.place) * static_cast<std::size_t>(hidden);
    return SumTerm{reinterpret_cast<const std::byte*>(result), pair.weight};
  };
  w.reduce_rows(out, n, term, SumFormat{plain, weighted}, LastTerm{}, part);
}

}  // namespace heddle
