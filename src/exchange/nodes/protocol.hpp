// elastic over several nodes, what happens in the heap of one node (docs/protocols/nodes.md): rows to ranks of the own node and
// into messages, rows out of messages to the ranks that need them, results to the ranks that send them on. Messages themselves are
// the caller's. The words are those of elastic, each told inside of a node.
#pragma once

#include "exchange/elastic/protocol.hpp"
#include "exchange/nodes/layout.hpp"

namespace heddle {

/// Messages that are filled: numbers [items, messages], the place of an item in each, -1: not in it.
struct FilledMessages {
  int count = 0;
  std::byte* const* bytes = nullptr;  ///< [count]
  const std::int32_t* numbers = nullptr;
};

/// A message that arrived, and the slot of its tokens at each rank of this node: slots [tokens, ranks a node], -1: not there.
struct ArrivedMessage {
  int source = 0;
  int tokens = 0;
  const std::byte* bytes = nullptr;
  const std::int32_t* slots = nullptr;
  const std::int32_t* totals = nullptr;  ///< [ranks a node]: tokens of each
};

/// The own node's ranks get their rows and a count; messages get theirs.
template <Worker W>
HEDDLE_PROTOCOL bool nodes_send(W& w, const NodesLayout& layout, const SendInput& input, const PlacementView& placement,
                                const ElasticScratch& scratch, const FilledMessages& messages) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.elastic;
  RankNumbers rows;
  if (!number_rows_by_rank(w, input, placement, scratch.sent, rows)) return false;
  const int places = heap.ranks + messages.count;
  const int bits = w.part_bits(input.tokens, elastic.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    // Where a part of the token's record goes: the ranks of this node, then messages.
    const auto at = [&](int i, auto in_heap, std::size_t in_record) -> std::byte* {
      if (i >= heap.ranks) {
        const int m = i - heap.ranks;
        const std::int32_t number = messages.numbers[token * messages.count + m];
        return number < 0 ? nullptr : messages.bytes[m] + layout.record(static_cast<std::size_t>(number)) + in_record;
      }
      const std::int32_t slot = rows.slots[token * heap.ranks + i];
      if (slot < 0 || !layout.together(heap.rank, i)) return nullptr;
      return heap.template at<std::byte>(i, in_heap(elastic.row_number(heap.rank, slot)));
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
          i, [&](std::size_t number) { return elastic.home_token(number); }, layout.home_token_in_record()));
    };
    send_row(w, places, row, input.hidden + static_cast<std::size_t>(token) * elastic.wire.hidden, elastic.wire,
             part_of(item, bits));
    if (!part_of(item, bits).last()) continue;
    send_routing(w, places, routing, input, token);
    write_each(w, places, home, [&](int) { return token; });
  }
  const auto word = [&](int d) {
    return layout.together(heap.rank, d) && w.live(d) ? heap.template at<Word>(d, elastic.count_word(heap.rank)) : nullptr;
  };
  announce(w, heap.ranks, word, [&](int d) { return rows.counts[d]; });
  return true;
}

/// Rows of other nodes' sources to the ranks of this one, as if their sources had written them, and their counts.
template <Worker W>
HEDDLE_PROTOCOL bool nodes_forward(W& w, const NodesLayout& layout, const ArrivedMessage* messages, int count,
                                   bool to_all_of_the_node) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.elastic;
  const int inside = layout.ranks_a_node();
  const int node = layout.node_of(heap.rank);
  for (int m = 0; m < count; ++m) {
    const ArrivedMessage& message = messages[m];
    for (int token = w.index(); token < message.tokens; token += w.count()) {
      const std::byte* record = message.bytes + layout.record(static_cast<std::size_t>(token));
      for (int place = 0; place < inside; ++place) {
        const std::int32_t slot = message.slots[token * inside + place];
        if (slot < 0) continue;
        const int d = layout.rank_of(node, place);
        const std::size_t number = elastic.row_number(message.source, slot);
        w.complete(w.copy_row(heap.template at<std::byte>(d, elastic.row(number)), record, elastic.wire));
        w.complete(w.copy_bytes(heap.template at<std::byte>(d, elastic.routing(number)), record + layout.routing_in_record(),
                                routing_bytes(elastic.shape.topk)));
        w.complete(w.copy_bytes(heap.template at<std::byte>(d, elastic.home_token(number)), record + layout.home_token_in_record(),
                                sizeof(std::int32_t)));
      }
    }
  }
  const auto word = [&](int i) -> Word* {
    const int place = i % inside;
    if (!to_all_of_the_node && place != layout.place_of(heap.rank)) return nullptr;
    if (!w.live(layout.rank_of(node, place))) return nullptr;
    return heap.template at<Word>(layout.rank_of(node, place), elastic.count_word(messages[i / inside].source));
  };
  announce(w, count * inside, word, [&](int i) { return messages[i / inside].totals[i % inside]; });
  return true;
}

/// Where results go that do not stay on this node: straight into messages, or to the rank that sends them on.
struct NodeResults {
  /// [ranks], null: none to that rank. All null: results for other nodes wait in the combine area, by region of the rank that they
  /// go to or, where they are forwarded, of the one at the own place of its node.
  std::byte* const* messages = nullptr;
  /// [arrived rows]: rows in the message before those of this one (reduce = home)
  const std::int32_t* rows_before = nullptr;
};

/// Results of the sources' rows: as elastic_return, with messages between nodes.
template <Worker W>
HEDDLE_PROTOCOL bool nodes_return(W& w, const NodesLayout& layout, const ElasticResults& results, const ElasticScratch& scratch,
                                  const NodeResults& out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.elastic;
  const int topk = elastic.shape.topk;
  const auto hidden = static_cast<std::size_t>(elastic.returned.hidden);
  const int bits = w.part_bits(w.sum_values(heap.ranks, scratch.arrived), elastic.returned.hidden);
  const auto arrived = [&](int s) { return scratch.arrived[s]; };
  w.deal(heap.ranks, heap.ranks, bits, arrived, [&](int s, int slot, int before, const RowPart& part) {
    const int i = before + slot;
    std::byte* message = out.messages != nullptr ? out.messages[s] : nullptr;
    if (elastic.reduce == Reduce::rank) {
      // By way of the rank of this node that has the home's place: where the home's node and this rank's place say.
      const bool waits_here = !layout.together(heap.rank, s) && !layout.results_forwarded();
      const int to = waits_here ? heap.rank : layout.rank_of(layout.node_of(heap.rank), layout.place_of(s));
      const int region = waits_here ? s : layout.rank_of(layout.node_of(s), layout.place_of(heap.rank));
      std::byte* home = message != nullptr ? message + layout.result(static_cast<std::size_t>(slot))
                                           : heap.template at<std::byte>(to, elastic.summed_row(region, slot));
      elastic_return_sum(w, elastic, results, scratch, i, home, part);
      return;
    }
    const auto first = static_cast<std::size_t>(scratch.home_tokens[i]) * static_cast<std::size_t>(topk);
    std::size_t number = message != nullptr ? static_cast<std::size_t>(out.rows_before[i]) : 0;
    for (int choice = 0; choice < topk; ++choice) {
      const int pair = i * topk + choice;
      if (scratch.routing.local_ids[pair] < 0) continue;
      const std::int32_t place = results.places != nullptr ? results.places[pair] : pair;
      std::byte* home = message != nullptr ? message + layout.result(number++)
                                           : heap.template at<std::byte>(s, elastic.slot(first + static_cast<std::size_t>(choice)));
      send_row(
          w, 1, [&](int) { return home; }, results.rows + static_cast<std::size_t>(place) * hidden, elastic.returned, part);
    }
  });
  const auto word = [&](int d) {
    return layout.together(heap.rank, d) && w.live(d) ? heap.template at<Word>(d, elastic.returned_word(heap.rank)) : nullptr;
  };
  announce(w, heap.ranks, word, [](int) { return 1; });
  return true;
}

/// Waits until the ranks of this node have returned their results here.
template <Worker W>
HEDDLE_PROTOCOL bool nodes_hear_results(W& w, const NodesLayout& layout) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto word = [&](int d) {
    return layout.together(heap.rank, d) && w.live(d) ? heap.template mine<const Word>(layout.elastic.returned_word(d)) : nullptr;
  };
  const auto name = [](int d) { return WordName{WordKind::elastic_returned, d, -1}; };
  return hear_each(w, heap.ranks, word, name, nullptr, nullptr);
}

/// Results that came by way of this rank, into messages for the sources of `messages`: in the order of their tokens, of each in
/// rank order.
template <Worker W>
HEDDLE_PROTOCOL bool nodes_gather(W& w, const NodesLayout& layout, const ArrivedMessage* messages, int count,
                                  std::byte* const* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const ElasticLayout& elastic = layout.elastic;
  const int inside = layout.ranks_a_node();
  for (int m = 0; m < count; ++m) {
    const ArrivedMessage& message = messages[m];
    std::size_t number = 0;
    for (int i = 0; i < message.tokens * inside; ++i) {
      if (message.slots[i] < 0) continue;
      const std::size_t row = number++;
      if (row % static_cast<std::size_t>(w.count()) != static_cast<std::size_t>(w.index())) continue;
      const int region = layout.rank_of(layout.node_of(message.source), i % inside);
      w.complete(w.copy_row(out[m] + layout.result(row),
                            heap.template mine<std::byte>(elastic.summed_row(region, message.slots[i])), elastic.returned));
    }
  }
  return true;
}

/// out [tokens, H]: terms [tokens, n] in the order in which elastic_collect adds them, null: none.
template <Worker W>
HEDDLE_PROTOCOL bool nodes_collect(W& w, const NodesLayout& layout, const SendInput& input, const std::byte* const* terms, int n,
                                   bool weighted, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const RowFormat& returned = layout.elastic.returned;
  const auto hidden = static_cast<std::size_t>(returned.hidden);
  const int bits = w.part_bits(input.tokens, returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto term = [&](int i) {
      const std::byte* row = terms[static_cast<std::ptrdiff_t>(token) * n + i];
      if (row == nullptr) return SumTerm{};
      return SumTerm{row, weighted ? input.weights[static_cast<std::ptrdiff_t>(token) * input.topk + i] : 1.0f};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, n, term, SumFormat{returned, weighted},
                  shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
