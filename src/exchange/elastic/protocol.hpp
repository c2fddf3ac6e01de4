// elastic, the protocol (docs/protocols/elastic.md): rows pushed once a rank, one count a rank behind
// them; the copy epilogue works on the receiver's own memory; results are pushed home.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/elastic/layout.hpp"

namespace heddle {

/// Ordinary memory of one rank for a round trip.
struct ElasticScratch {
  std::int32_t* slots = nullptr;        ///< [tokens, ranks]: where each token went
  std::int32_t* sent = nullptr;         ///< [ranks]
  std::int32_t* arrived = nullptr;      ///< [ranks]
  std::int32_t* home_tokens = nullptr;  ///< [arrived rows]: the token at its home
  ArrivedRouting routing;               ///< [arrived rows, topk]
  std::int32_t* before = nullptr;       ///< GPUs only: [chunks of tokens, ranks]
};

template <Worker W>
HEDDLE_PROTOCOL bool elastic_send(W& w, const ElasticLayout& layout, const SendInput& input, const PlacementView& placement,
                                  const ElasticScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  if (!number_rows_by_rank(w, input, placement, scratch.slots, scratch.sent, scratch.before)) return false;
  for (int token = w.index(); token < input.tokens; token += w.count()) {
    const std::byte* row = nullptr;
    for (int d = 0; d < heap.ranks; ++d) {
      const std::int32_t slot = scratch.slots[token * heap.ranks + d];
      if (slot < 0) continue;
      if (row == nullptr) row = row_to_send(w, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire);
      const std::size_t number = layout.row_number(heap.rank, slot);
      w.copy_row(heap.at<std::byte>(d, layout.row(number)), row, layout.wire);
      send_routing(w, heap.at<std::byte>(d, layout.routing(number)), input, token);
      w.write(heap.at<std::int32_t>(d, layout.home_token(number)), token);
    }
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.count_word(peer); };
  tell_each(w, word, scratch.sent);
  return true;
}

/// Waits for every live rank's count: after it the rows are there, and the host may read the counts.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_receive(W& w, const ElasticLayout& layout, const ElasticScratch& scratch) {
  if (!w.begin()) return false;
  const auto word = [&](int peer) { return layout.count_word(peer); };
  return hear_all(w, word, WordKind::elastic_count, scratch.arrived);
}

/// visit(i, number) for the arrived rows in (source, slot) order: i counts them, number is the region row.
template <Worker W, class Visit>
HEDDLE_PROTOCOL int for_arrived_rows(W& w, const ElasticLayout& layout, const std::int32_t* arrived, Visit visit) {
  const int ranks = layout.shape.ranks;
  return w.deal(
      ranks, ranks, [&](int s) { return arrived[s]; }, [&](int s, int slot, int before) { visit(before + slot, s, slot); });
}

/// Copy epilogue, first part: the routing of the arrived rows, then "no expert" up to `room` rows.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_list(W& w, const ElasticLayout& layout, int room, const PlacementView& placement,
                                  const ElasticScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const int n = for_arrived_rows(w, layout, scratch.arrived, [&](int i, int s, int slot) {
    const std::size_t number = layout.row_number(s, slot);
    take_routing(w, scratch.routing, static_cast<std::size_t>(i), heap.mine<std::byte>(layout.routing(number)), placement);
    scratch.home_tokens[i] = w.read(heap.mine<std::int32_t>(layout.home_token(number)));
  });
  for (int i = n + w.index(); i < room; i += w.count())
    take_routing(w, scratch.routing, static_cast<std::size_t>(i), nullptr, placement);
  return w.team_barrier();
}

/// Second part, in arrival order: rows [n] in wire format into ordinary memory.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_copy_out(W& w, const ElasticLayout& layout, const ElasticScratch& scratch, std::byte* rows) {
  const HeapView& heap = w.heap();
  for_arrived_rows(w, layout, scratch.arrived, [&](int i, int s, int slot) {
    w.copy_row(rows + static_cast<std::size_t>(i) * layout.wire.row_bytes(),
               heap.mine<std::byte>(layout.row(layout.row_number(s, slot))), layout.wire);
  });
  w.complete_all();
  return w.team_barrier();
}

/// Second part, by expert (do_expand): straight from the regions.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_expand(W& w, const ElasticLayout& layout, const ElasticScratch& scratch, const ExpertLayout& to) {
  const HeapView& heap = w.heap();
  int n = 0;
  for (int s = 0; s < heap.ranks; ++s) n += scratch.arrived[s];
  const auto row_of = [&](int i) {
    int s = 0;
    for (; i >= scratch.arrived[s]; ++s) i -= scratch.arrived[s];
    return heap.mine<std::byte>(layout.row(layout.row_number(s, i)));
  };
  return expand_rows(w, n, scratch.routing, layout.wire, row_of, to);
}

/// reduce = rank: sums [n, H] (one summed row an arrived row) go home, to the slot their token had here.
/// reduce = home: results by place (see ArrivedRouting), one row a choice.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_return(W& w, const ElasticLayout& layout, const bf16* sums, const bf16* results,
                                    const std::int32_t* places, const ElasticScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  for_arrived_rows(w, layout, scratch.arrived, [&](int i, int s, int slot) {
    if (layout.reduce == Reduce::rank) {
      const std::byte* row = row_to_send(w, sums + static_cast<std::size_t>(i) * hidden, layout.returned);
      w.copy_row(heap.at<std::byte>(s, layout.summed_row(heap.rank, slot)), row, layout.returned);
      return;
    }
    for (int choice = 0; choice < layout.shape.topk; ++choice) {
      const std::int32_t place = places[i * layout.shape.topk + choice];
      if (place < 0) continue;
      const std::byte* row = row_to_send(w, results + static_cast<std::size_t>(place) * hidden, layout.returned);
      const auto pair = static_cast<std::size_t>(scratch.home_tokens[i]) * static_cast<std::size_t>(layout.shape.topk) +
                        static_cast<std::size_t>(choice);
      w.copy_row(heap.at<std::byte>(s, layout.slot(pair)), row, layout.returned);
    }
  });
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.returned_word(peer); };
  tell_all(w, word, 1);
  return true;
}

/// out [tokens, H]: over ranks in ascending order (reduce = rank) or over choices (home).
template <Worker W>
HEDDLE_PROTOCOL bool elastic_collect(W& w, const ElasticLayout& layout, const SendInput& input, const PlacementView& placement,
                                     const ElasticScratch& scratch, bool weighted, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto word = [&](int peer) { return layout.returned_word(peer); };
  if (!hear_all(w, word, WordKind::elastic_returned)) return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const bool by_rank = layout.reduce == Reduce::rank;
  const int parts = w.row_parts(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens * parts; item += w.count()) {
    const int token = item / parts;
    const auto of_rank = [&](int d) {
      const std::int32_t slot = scratch.slots[token * heap.ranks + d];
      return slot < 0 ? SumTerm{} : SumTerm{heap.mine<std::byte>(layout.summed_row(d, slot))};
    };
    const auto of_choice = [&](int choice) {
      const int pair = token * input.topk + choice;
      const std::int32_t id = input.ids[pair];
      if (id < 0 || !w.live(placement.rank_of[id])) return SumTerm{};
      return SumTerm{heap.mine<std::byte>(layout.slot(static_cast<std::size_t>(pair))), input.weights[pair]};
    };
    const auto term = [&](int i) { return by_rank ? of_rank(i) : of_choice(i); };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, by_rank ? heap.ranks : input.topk, term,
                  SumFormat{layout.returned, weighted && !by_rank}, shared.of(static_cast<std::size_t>(token), hidden),
                  item % parts, parts);
  }
  return w.team_barrier();
}

}  // namespace heddle
