// gather, the protocol (docs/protocols/gather.md). Rows reach every rank by an all-gather (padded blocks,
// or at exact offsets after the counts have been exchanged) or as the sum of zero-filled buffers; the
// partial sums come back by pulling. Under tensor-parallel attention no row is sent (counts are, as the
// rendezvous of dispatch), each rank pulls its slice, and all_gather_rows makes an all-reduce of it.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/gather/layout.hpp"

namespace heddle {

/// Everybody's number of tokens, so that rows can be laid at exact offsets; the first squad leaves them in counts
/// [ranks]. Null on abort.
template <Worker W>
HEDDLE_PROTOCOL const std::int32_t* gather_exchange_counts(W& w, const GatherLayout& layout, int tokens, std::int32_t* counts) {
  if (!w.begin()) return nullptr;
  const auto word = [&](int peer) { return layout.count_word(peer); };
  tell(w, word, [&](int) { return tokens; });
  return hear(w, word, WordKind::gather_count, counts);
}

/// Writes one token's record to to(rank) for each live rank of [first_rank, last_rank).
template <Worker W, class To>
HEDDLE_PROTOCOL void gather_write_record(W& w, const GatherLayout& layout, const SendInput& input, int token, int first_rank,
                                         int last_rank, To to, const RowPart& part = {}) {
  const auto row = [&](int i) { return w.live(first_rank + i) ? to(first_rank + i) : nullptr; };
  const auto routing = [&](int i) { return w.live(first_rank + i) ? to(first_rank + i) + layout.wire.row_bytes() : nullptr; };
  send_row(w, last_rank - first_rank, row, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire, part);
  if (part.last()) send_routing(w, last_rank - first_rank, routing, input, token);
}

/// All-gather: this rank's records to every rank at rows [first, first + tokens), then the word that they are there, which
/// gather_hear waits for: the tokens of every rank, left in `arrived` by the first squad; null on abort.
template <Worker W>
HEDDLE_PROTOCOL bool gather_send(W& w, const GatherLayout& layout, std::size_t first, const SendInput& input) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const std::size_t offset = layout.record(first + static_cast<std::size_t>(token));
    const auto to = [&](int d) { return heap.at<std::byte>(d, offset); };
    gather_write_record(w, layout, input, token, 0, heap.ranks, to, part_of(item, bits));
  }
  tell(
      w, [&](int peer) { return layout.arrived_word(peer); }, [&](int) { return input.tokens; });
  return true;
}
template <Worker W>
HEDDLE_PROTOCOL const std::int32_t* gather_hear(W& w, const GatherLayout& layout, std::int32_t* arrived) {
  if (!w.begin()) return nullptr;
  const auto word = [&](int peer) { return layout.arrived_word(peer); };
  return hear(w, word, WordKind::gather_arrived, arrived);
}

/// All-reduce of zero-filled buffers of `rows` records: about twice the bytes of a gather. Summed as
/// integers, since at most one rank's record is not zero: exact for every wire. `zeros` and `sum` are
/// ordinary memory of one record a worker.
template <Worker W>
HEDDLE_PROTOCOL bool gather_all_reduce(W& w, const GatherLayout& layout, std::size_t rows, std::size_t first,
                                       const SendInput& input, const std::byte* zeros, std::byte* sum) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto stride = static_cast<std::size_t>(w.count());
  for (auto row = static_cast<std::size_t>(w.index()); row < rows; row += stride) {
    auto* own = heap.mine<std::byte>(layout.own_record(row));
    const bool mine = row >= first && row < first + static_cast<std::size_t>(input.tokens);
    const std::size_t written = mine ? layout.wire.row_bytes() : 0;  // a record of its own is written whole but for its padding
    w.complete(w.copy_bytes(own + written, zeros, layout.record_bytes() - written));
    if (!mine) continue;
    gather_write_record(w, layout, input, static_cast<int>(row - first), heap.rank, heap.rank + 1, [&](int) { return own; });
  }
  const auto yes = [](int) { return 1; };
  const auto arrived = [&](int peer) { return layout.arrived_word(peer); };
  tell(w, arrived, yes);
  if (!hear_all(w, arrived, WordKind::gather_arrived)) return false;
  const LiveShare share = live_share(w);
  for (std::size_t row = share.position; row < rows; row += share.count) {
    if ((row / share.count) % stride != static_cast<std::size_t>(w.index())) continue;
    bool begun = false;
    for (int s = 0; s < heap.ranks; ++s) {
      if (!w.live(s)) continue;
      const auto* part = heap.at<std::byte>(s, layout.own_record(row));
      if (begun) {
        w.add_words(sum, part, layout.record_bytes());
      } else {
        w.complete(w.copy_bytes(sum, part, layout.record_bytes()));
      }
      begun = true;
    }
    for (int d = 0; d < heap.ranks; ++d) {
      if (!w.live(d)) continue;
      auto* record = heap.at<std::byte>(d, layout.record(row));
      w.copy_row(record, sum, layout.wire);
      w.copy_bytes(record + layout.wire.row_bytes(), sum + layout.wire.row_bytes(), routing_bytes(layout.shape.topk));
    }
    w.complete_all();
  }
  const auto reduced = [&](int peer) { return layout.reduced_word(peer); };
  tell(w, reduced, yes);
  return hear_all(w, reduced, WordKind::gather_reduced);
}

/// Routing of the gathered rows in ordinary memory; rows that padding(row) says are marked as "no expert".
template <Worker W, class Padding, class Count = NotCounted>
HEDDLE_PROTOCOL void gather_list(W& w, const GatherLayout& layout, int rows, const PlacementView& placement,
                                 const ArrivedRouting& routing, Padding padding, const Count& count = {}) {
  const auto routing_of = [&](int row) {
    const auto* record = w.heap().template mine<std::byte>(layout.record(static_cast<std::size_t>(row)));
    return padding(row) ? nullptr : record + layout.wire.row_bytes();
  };
  list_routing(w, rows, routing_of, placement, routing, count);
}

/// results [rows, H]: this rank's partial sums of all rows, for the others to pull. Where they were not made in the heap
/// itself they are laid there.
template <Worker W>
HEDDLE_PROTOCOL bool gather_offer(W& w, const GatherLayout& layout, int rows, const bf16* results) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto word = [&](int peer) { return layout.partial_word(peer); };
  const auto yes = [](int) { return 1; };
  if (results == heap.mine<bf16>(layout.partial(0))) {
    tell_at_once(w, word, yes);
    return true;
  }
  const int bits = w.part_bits(rows, layout.returned.hidden);
  for (int item = w.index(); item < rows << bits; item += w.count()) {
    const auto row = static_cast<std::size_t>(row_of(item, bits));
    const auto to = [&](int) { return heap.mine<std::byte>(layout.partial(row)); };
    send_row(w, 1, to, results + row * static_cast<std::size_t>(layout.returned.hidden), layout.returned, part_of(item, bits));
  }
  tell(w, word, yes);
  return true;
}

/// out [rows, H] = sum over ranks, ascending, of their partial sums of rows [first, first + rows). Does not end with a
/// barrier.
template <Worker W>
HEDDLE_PROTOCOL bool gather_pull(W& w, const GatherLayout& layout, std::size_t first, int rows, const SharedRows& shared,
                                 bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  if (!hear_all(
          w, [&](int peer) { return layout.partial_word(peer); }, WordKind::gather_partial))
    return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(rows, layout.returned.hidden);
  for (int item = w.index(); item < rows << bits; item += w.count()) {
    const auto row = static_cast<std::size_t>(row_of(item, bits));
    const auto term = [&](int d) { return w.live(d) ? SumTerm{heap.at<std::byte>(d, layout.partial(first + row))} : SumTerm{}; };
    w.reduce_rows(out + row * hidden, heap.ranks, term, SumFormat{layout.returned, false}, shared.of(row, hidden),
                  part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
