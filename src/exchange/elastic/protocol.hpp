// elastic, the protocol (docs/protocols/elastic.md): rows pushed once a rank, one count a rank behind
// them; the copy epilogue works on the receiver's own memory; results are pushed home.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/elastic/layout.hpp"

namespace heddle {

/// Ordinary memory of one rank for a round trip.
struct ElasticScratch {
  Numbering sent;                       ///< where each token went, see number_rows_by_rank
  std::int32_t* arrived = nullptr;      ///< [ranks]
  std::int32_t* home_tokens = nullptr;  ///< [arrived rows]: the token at its home
  ArrivedRouting routing;               ///< [arrived rows, topk]
};

template <Worker W>
HEDDLE_PROTOCOL bool elastic_send(W& w, const ElasticLayout& layout, const SendInput& input, const PlacementView& placement,
                                  const ElasticScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  RankNumbers rows;
  if (!number_rows_by_rank(w, input, placement, scratch.sent, rows)) return false;
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto at = [&](int d, auto offset_of) {
      const std::int32_t slot = rows.slots[token * heap.ranks + d];
      return slot < 0 ? nullptr : heap.at<std::byte>(d, offset_of(layout.row_number(heap.rank, slot)));
    };
    const auto row = [&](int d) { return at(d, [&](std::size_t number) { return layout.row(number); }); };
    const auto routing = [&](int d) { return at(d, [&](std::size_t number) { return layout.routing(number); }); };
    const auto home = [&](int d) {
      return reinterpret_cast<std::int32_t*>(at(d, [&](std::size_t number) { return layout.home_token(number); }));
    };
    send_row(w, heap.ranks, row, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire,
             part_of(item, bits));
    if (!part_of(item, bits).last()) continue;
    send_routing(w, heap.ranks, routing, input, token);
    write_each(w, heap.ranks, home, [&](int) { return token; });
  }
  tell(
      w, [&](int peer) { return layout.count_word(peer); }, [&](int d) { return rows.counts[d]; });
  return true;
}

/// Waits for every live rank's count: after it the rows are there, and the host may read the counts. Rows from each rank,
/// or null on abort.
template <Worker W>
HEDDLE_PROTOCOL const std::int32_t* elastic_receive(W& w, const ElasticLayout& layout, const ElasticScratch& scratch) {
  if (!w.begin()) return nullptr;
  const auto word = [&](int peer) { return layout.count_word(peer); };
  return hear(w, word, WordKind::elastic_count, scratch.arrived);
}

/// The region row of the i-th arrived row in (source, slot) order.
HEDDLE_HOST_DEVICE inline std::size_t arrived_row_number(const ElasticLayout& layout, const std::int32_t* arrived, int i) {
  int s = 0;
  for (; i >= arrived[s]; ++s) i -= arrived[s];
  return layout.row_number(s, i);
}

/// Copy epilogue, first part: the routing and the home tokens of the n arrived rows, then "no expert" up to `room` rows.
template <Worker W, class Count = NotCounted>
HEDDLE_PROTOCOL bool elastic_list(W& w, const ElasticLayout& layout, const std::int32_t* arrived, int n, int room,
                                  const PlacementView& placement, const ElasticScratch& scratch, const Count& count = {}) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto routing_of = [&](int i) {
    return i < n ? heap.template mine<std::byte>(layout.routing(arrived_row_number(layout, arrived, i))) : nullptr;
  };
  list_routing(w, room, routing_of, placement, scratch.routing, count);
  w.spread(n, 1, [&](int i, int) {
    const std::size_t number = arrived_row_number(layout, arrived, i);
    scratch.home_tokens[i] = w.load(heap.template mine<const std::int32_t>(layout.home_token(number)));
  });
  return true;
}

/// Second part, in arrival order: rows [n] in wire format into ordinary memory.
template <Worker W>
HEDDLE_PROTOCOL void elastic_copy_out(W& w, const ElasticLayout& layout, const std::int32_t* arrived, int n, std::byte* rows) {
  const HeapView heap = w.heap();
  const int bits = w.part_bits(n, layout.wire.hidden);
  for (int item = w.index(); item < n << bits; item += w.count()) {
    const int i = row_of(item, bits);
    const auto to = [&](int) { return rows + static_cast<std::size_t>(i) * layout.wire.row_bytes(); };
    copy_row(w, 1, to, heap.mine<std::byte>(layout.row(arrived_row_number(layout, arrived, i))), layout.wire, part_of(item, bits));
  }
  w.complete_all();
}

/// Second part, by expert (do_expand): straight from the regions. Rows are few: every squad looks at all ids by itself;
/// else all wait for the list.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_expand(W& w, const ElasticLayout& layout, const std::int32_t* arrived, int n,
                                    const PlacementView& placement, const ElasticScratch& scratch, const ExpertLayout& to) {
  const HeapView heap = w.heap();
  const int k = layout.shape.topk;
  const auto routing_of = [&](int i) {
    return heap.template mine<const std::int32_t>(layout.routing(arrived_row_number(layout, arrived, i)));
  };
  const std::int32_t* local_ids = nullptr;
  if (n * k <= few_kinds) {
    local_ids = squad_copy(
        w, n, k, [&](int i, int choice) { return routing_of(i) + choice; },
        [&](std::int32_t id) { return placement.local_id(id, heap.rank); });
  }
  if (local_ids == nullptr) {
    if (!w.team_barrier()) return false;
    local_ids = scratch.routing.local_ids;
  }
  const auto bytes_of = [&](int i) { return heap.mine<std::byte>(layout.row(arrived_row_number(layout, arrived, i))); };
  const auto weights_of = [&](int i) { return reinterpret_cast<const float*>(routing_of(i)) + k; };
  return expand_rows(w, n, k, local_ids, layout.wire, bytes_of, weights_of, to);
}

/// What goes home of the arrived rows, and where it lies.
struct ElasticResults {
  const bf16* rows = nullptr;            ///< results by place, or, with `summed`, one a row
  const std::int32_t* places = nullptr;  ///< [arrived rows, topk], -1: no result here; null: a pair's place is its own number
  bool summed = false;                   ///< the runner summed the pairs of a row
  bool weighted = false;                 ///< sums multiply by the routing weights
  bf16* sums = nullptr;                  ///< [arrived rows, H]: room for sums that have to be quantised
};

/// One row of a result a rank (reduce = rank): to the slot that its token had here.
template <Worker W>
HEDDLE_PROTOCOL void elastic_return_sum(W& w, const ElasticLayout& layout, const ElasticResults& results,
                                        const ElasticScratch& scratch, int i, std::byte* home, const RowPart& part) {
  const int hidden = layout.returned.hidden;
  const auto row = static_cast<std::size_t>(i) * static_cast<std::size_t>(hidden);
  const auto to = [&](int) { return home; };
  if (results.summed) {
    send_row(w, 1, to, results.rows + row, layout.returned, part);
  } else if (layout.returned.wire == Wire::bf16) {
    sum_pairs(w, i, scratch.routing, results.places, results.rows, hidden, results.weighted, reinterpret_cast<bf16*>(home), part);
  } else {
    sum_pairs(w, i, scratch.routing, results.places, results.rows, hidden, results.weighted, results.sums + row, part);
    w.complete_all();  // a lane sends what other lanes have summed
    send_row(w, 1, to, results.sums + row, layout.returned, part);
  }
}

/// reduce = rank: one summed row an arrived row goes home; reduce = home: one row a choice.
template <Worker W>
HEDDLE_PROTOCOL bool elastic_return(W& w, const ElasticLayout& layout, const ElasticResults& results,
                                    const ElasticScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const int ranks = heap.ranks;
  const int topk = layout.shape.topk;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(w.sum_values(ranks, scratch.arrived), layout.returned.hidden);
  const auto arrived = [&](int s) { return scratch.arrived[s]; };
  w.deal(ranks, ranks, bits, arrived, [&](int s, int slot, int before, const RowPart& part) {
    const int i = before + slot;
    if (layout.reduce == Reduce::rank) {
      elastic_return_sum(w, layout, results, scratch, i, heap.at<std::byte>(s, layout.summed_row(heap.rank, slot)), part);
      return;
    }
    const auto first = static_cast<std::size_t>(scratch.home_tokens[i]) * static_cast<std::size_t>(topk);
    for (int choice = 0; choice < topk; ++choice) {
      const int pair = i * topk + choice;
      const bool here = scratch.routing.local_ids[pair] >= 0;
      const std::int32_t place = results.places != nullptr ? results.places[pair] : (here ? pair : -1);
      if (place < 0) continue;
      const auto to = [&](int) { return heap.at<std::byte>(s, layout.slot(first + static_cast<std::size_t>(choice))); };
      send_row(w, 1, to, results.rows + static_cast<std::size_t>(place) * hidden, layout.returned, part);
    }
  });
  tell(
      w, [&](int peer) { return layout.returned_word(peer); }, [](int) { return 1; });
  return true;
}

/// out [tokens, H]: over ranks in ascending order (reduce = rank) or over choices (home).
template <Worker W>
HEDDLE_PROTOCOL bool elastic_collect(W& w, const ElasticLayout& layout, const SendInput& input, const PlacementView& placement,
                                     const ElasticScratch& scratch, bool weighted, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  if (!hear_all(
          w, [&](int peer) { return layout.returned_word(peer); }, WordKind::elastic_returned))
    return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const bool by_rank = layout.reduce == Reduce::rank;
  const int bits = w.part_bits(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    // By rank a term is the slot there, by choice the rank of the choice and its weight.
    const auto terms = side_by_side(w, by_rank ? heap.ranks : input.topk, [&](int i) {
      if (!by_rank) return live_choice(w, input, placement, token, i);
      return LiveChoice{scratch.sent.numbers[token * heap.ranks + i], 1.0f};
    });
    const auto of_rank = [&](int d) {
      const std::int32_t slot = terms(d).rank;
      return slot < 0 ? SumTerm{} : SumTerm{heap.mine<std::byte>(layout.summed_row(d, slot))};
    };
    const auto of_choice = [&](int choice) {
      const LiveChoice mine = terms(choice);
      if (mine.rank < 0) return SumTerm{};
      const auto pair = static_cast<std::size_t>(token) * static_cast<std::size_t>(input.topk) + static_cast<std::size_t>(choice);
      return SumTerm{heap.mine<std::byte>(layout.slot(pair)), mine.weight};
    };
    const auto term = [&](int i) { return by_rank ? of_rank(i) : of_choice(i); };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, by_rank ? heap.ranks : input.topk, term,
                  SumFormat{layout.returned, weighted && !by_rank}, shared.of(static_cast<std::size_t>(token), hidden),
                  part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
