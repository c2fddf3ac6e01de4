// elastic over several nodes by batches (batch.hpp), what happens on one rank between the swaps: the words are those of elastic,
// each told inside of a node, as in nodes/protocol.hpp, whose nodes_return and nodes_hear_results serve here, too.
#pragma once

#include "exchange/nodes/batch.hpp"
#include "exchange/nodes/protocol.hpp"

namespace heddle {

/// Own rows to the ranks of this node that need them, and all into the batch for other nodes, behind its head.
template <Worker W>
HEDDLE_PROTOCOL bool batch_send(W& w, const BatchLayout& layout, const SendInput& input, const PlacementView& placement,
                                const ElasticScratch& scratch, std::byte* batch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.nodes.elastic;
  RankNumbers rows;
  if (!number_rows_by_rank(w, input, placement, scratch.sent, rows)) return false;
  const int inside = layout.nodes.ranks_a_node();
  const int first = layout.first_on_node(heap.rank);
  const int bits = w.part_bits(input.tokens, elastic.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const std::int32_t* slots = rows.slots + token * heap.ranks;
    // Where a part of the token goes: the ranks of this node, then the batch.
    const auto at = [&](int i, auto in_heap, std::size_t in_record) -> std::byte* {
      if (i == inside) return batch + layout.record(token) + in_record;
      const std::int32_t slot = slots[first + i];
      return slot < 0 ? nullptr : heap.template at<std::byte>(first + i, in_heap(elastic.row_number(heap.rank, slot)));
    };
    const auto row = [&](int i) {
      return at(
          i, [&](std::size_t number) { return elastic.row(number); }, 0);
    };
    const auto routing = [&](int i) {
      return at(
          i, [&](std::size_t number) { return elastic.routing(number); }, layout.routing_in_record());
    };
    const auto home = [&](int i) {
      return reinterpret_cast<std::int32_t*>(at(
          i, [&](std::size_t number) { return elastic.home_token(number); }, 0));
    };
    const auto in_record = [&](int) {
      return reinterpret_cast<std::int32_t*>(batch + layout.record(token) + layout.slots_in_record());
    };
    send_row(w, inside + 1, row, input.hidden + static_cast<std::size_t>(token) * elastic.wire.hidden, elastic.wire,
             part_of(item, bits));
    if (!part_of(item, bits).last()) continue;
    send_routing(w, inside + 1, routing, input, token);
    write_each(w, inside, home, [&](int) { return token; });
    send_values(w, 1, in_record, slots, heap.ranks);
  }
  const auto totals = [&](int) { return reinterpret_cast<std::int32_t*>(batch + layout.totals()); };
  if (w.index() == 0) send_values(w, 1, totals, rows.counts, heap.ranks);
  const auto word = [&](int d) {
    return layout.nodes.together(heap.rank, d) ? heap.template at<Word>(d, elastic.count_word(heap.rank)) : nullptr;
  };
  announce(w, heap.ranks, word, [&](int d) { return rows.counts[d]; });
  return true;
}

/// Rows of other nodes' sources to the ranks of this one, as if their sources had written them, and their counts.
template <Worker W>
HEDDLE_PROTOCOL bool batch_forward(W& w, const BatchLayout& layout, const BatchMail& mail) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.nodes.elastic;
  const int first = layout.first_target(heap.rank);
  const int targets = layout.targets();
  const auto batch_of = [&](int peer) { return mail.arrived + static_cast<std::size_t>(peer) * mail.stride; };
  for (int peer = 0; peer < layout.peers(); ++peer) {
    const std::byte* batch = batch_of(peer);
    const int source = layout.peer(heap.rank, peer);
    const auto tokens = static_cast<int>(reinterpret_cast<const BatchHead*>(batch)->tokens);
    const int bits = w.part_bits(tokens, elastic.wire.hidden);
    for (int item = w.index(); item < tokens << bits; item += w.count()) {
      const int token = row_of(item, bits);
      const std::byte* record = batch + layout.record(token);
      const auto* slots = reinterpret_cast<const std::int32_t*>(record + layout.slots_in_record()) + first;
      const auto at = [&](int i, auto in_heap) -> std::byte* {
        return slots[i] < 0 ? nullptr : heap.template at<std::byte>(first + i, in_heap(elastic.row_number(source, slots[i])));
      };
      const auto row = [&](int i) { return at(i, [&](std::size_t number) { return elastic.row(number); }); };
      const auto routing = [&](int i) {
        return reinterpret_cast<std::int32_t*>(at(i, [&](std::size_t number) { return elastic.routing(number); }));
      };
      const auto home = [&](int i) {
        return reinterpret_cast<std::int32_t*>(at(i, [&](std::size_t number) { return elastic.home_token(number); }));
      };
      copy_row(w, targets, row, record, elastic.wire, part_of(item, bits));
      if (!part_of(item, bits).last()) continue;
      send_values(w, targets, routing, reinterpret_cast<const std::int32_t*>(record + layout.routing_in_record()),
                  2 * elastic.shape.topk);
      write_each(w, targets, home, [&](int) { return token; });
    }
  }
  const auto word = [&](int i) {
    return heap.template at<Word>(first + i % targets, elastic.count_word(layout.peer(heap.rank, i / targets)));
  };
  announce(w, layout.peers() * targets, word, [&](int i) {
    return reinterpret_cast<const std::int32_t*>(batch_of(i / targets) + layout.totals())[first + i % targets];
  });
  return true;
}

/// out [tokens, H]: over ranks in ascending order, of this node from the combine area, of others from what came.
template <Worker W>
HEDDLE_PROTOCOL bool batch_collect(W& w, const BatchLayout& layout, const SendInput& input, const ElasticScratch& scratch,
                                   const BatchMail& mail, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.nodes.elastic;
  const auto hidden = static_cast<std::size_t>(elastic.returned.hidden);
  const int bits = w.part_bits(input.tokens, elastic.returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto slots = side_by_side(w, heap.ranks, [&](int d) { return scratch.sent.numbers[token * heap.ranks + d]; });
    const auto term = [&](int d) {
      const std::int32_t slot = slots(d);
      if (slot < 0) return SumTerm{};
      if (layout.nodes.together(heap.rank, d)) return SumTerm{heap.template mine<std::byte>(elastic.summed_row(d, slot))};
      return SumTerm{mail.results + layout.result(layout.number_of_stranger(heap.rank, d), slot)};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, heap.ranks, term, SumFormat{elastic.returned, false},
                  shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
