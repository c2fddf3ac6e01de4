// gather, the protocol (docs/protocols/gather.md). Rows reach every rank by an all-gather (padded blocks,
// or at exact offsets after the counts have been exchanged) or as the sum of zero-filled buffers; the
// partial sums come back by pulling. Under tensor-parallel attention no row is sent (counts are, as the
// rendezvous of dispatch), each rank pulls its slice, and all_gather_rows makes an all-reduce of it.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/gather/layout.hpp"

namespace heddle {

/// counts[s] = tokens of every rank, so that rows can be laid at exact offsets.
template <Worker W>
HEDDLE_PROTOCOL bool gather_exchange_counts(W& w, const GatherLayout& layout, int tokens, std::int32_t* counts) {
  if (!w.begin()) return false;
  const auto word = [&](int peer) { return layout.count_word(peer); };
  tell_all(w, word, static_cast<std::uint32_t>(tokens));
  return hear_all(w, word, WordKind::gather_count, counts);
}

/// Writes one token's record to `to(rank)` for each live rank of [first_rank, last_rank).
template <Worker W, class To>
HEDDLE_PROTOCOL void gather_write_record(W& w, const GatherLayout& layout, const SendInput& input, int token, int first_rank,
                                         int last_rank, To to) {
  const std::byte* row = row_to_send(w, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire);
  for (int d = first_rank; d < last_rank; ++d) {
    if (!w.live(d)) continue;
    std::byte* record = to(d);
    w.copy_row(record, row, layout.wire);
    send_routing(w, record + layout.wire.row_bytes(), input, token);
  }
}

/// All-gather: this rank's records to every rank at rows [first, first + tokens); arrived[s] = tokens of s.
template <Worker W>
HEDDLE_PROTOCOL bool gather_all_gather(W& w, const GatherLayout& layout, std::size_t first, const SendInput& input,
                                       std::int32_t* arrived) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  for (int token = w.index(); token < input.tokens; token += w.count()) {
    const std::size_t offset = layout.record(first + static_cast<std::size_t>(token));
    gather_write_record(w, layout, input, token, 0, heap.ranks, [&](int d) { return heap.at<std::byte>(d, offset); });
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.arrived_word(peer); };
  tell_all(w, word, static_cast<std::uint32_t>(input.tokens));
  return hear_all(w, word, WordKind::gather_arrived, arrived);
}

/// All-reduce of zero-filled buffers of `rows` records: about twice the bytes of a gather. Summed as
/// integers, since at most one rank's record is not zero: exact for every wire. `zeros` and `sum` are
/// ordinary memory of one record a worker.
template <Worker W>
HEDDLE_PROTOCOL bool gather_all_reduce(W& w, const GatherLayout& layout, std::size_t rows, std::size_t first,
                                       const SendInput& input, const std::byte* zeros, std::byte* sum) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto stride = static_cast<std::size_t>(w.count());
  for (auto row = static_cast<std::size_t>(w.index()); row < rows; row += stride) {
    auto* own = heap.mine<std::byte>(layout.own_record(row));
    const bool mine = row >= first && row < first + static_cast<std::size_t>(input.tokens);
    const std::size_t written = mine ? layout.wire.row_bytes() : 0;  // a record of its own is written whole but for its padding
    w.complete(w.copy_bytes(own + written, zeros, layout.record_bytes() - written));
    if (!mine) continue;
    gather_write_record(w, layout, input, static_cast<int>(row - first), heap.rank, heap.rank + 1, [&](int) { return own; });
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto arrived = [&](int peer) { return layout.arrived_word(peer); };
  tell_all(w, arrived, 1);
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
  if (!w.team_barrier()) return false;
  const auto reduced = [&](int peer) { return layout.reduced_word(peer); };
  tell_all(w, reduced, 1);
  return hear_all(w, reduced, WordKind::gather_reduced, nullptr);
}

/// Routing of the gathered rows in ordinary memory; rows that padding(row) says are marked as "no expert".
template <Worker W, class Padding>
HEDDLE_PROTOCOL bool gather_list(W& w, const GatherLayout& layout, int rows, const PlacementView& placement,
                                 const ArrivedRouting& routing, Padding padding) {
  for (int row = w.index(); row < rows; row += w.count()) {
    const auto* record = w.heap().template mine<std::byte>(layout.record(static_cast<std::size_t>(row)));
    take_routing(w, routing, static_cast<std::size_t>(row), padding(row) ? nullptr : record + layout.wire.row_bytes(), placement);
  }
  return w.team_barrier();
}

/// results [rows, H]: this rank's partial sums of all rows, laid out for the others to pull.
template <Worker W>
HEDDLE_PROTOCOL bool gather_offer(W& w, const GatherLayout& layout, std::size_t rows, const bf16* results) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  for (auto row = static_cast<std::size_t>(w.index()); row < rows; row += static_cast<std::size_t>(w.count())) {
    const std::byte* bytes = row_to_send(w, results + row * static_cast<std::size_t>(layout.returned.hidden), layout.returned);
    w.copy_row(heap.mine<std::byte>(layout.partial(row)), bytes, layout.returned);
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.partial_word(peer); };
  tell_all(w, word, 1);
  return true;
}

/// out [rows, H] = sum over ranks, ascending, of their partial sums of rows [first, first + rows).
template <Worker W>
HEDDLE_PROTOCOL bool gather_pull(W& w, const GatherLayout& layout, std::size_t first, std::size_t rows, const SharedRows& shared,
                                 bf16* out) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto word = [&](int peer) { return layout.partial_word(peer); };
  if (!hear_all(w, word, WordKind::gather_partial)) return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const auto parts = static_cast<std::size_t>(w.row_parts(static_cast<int>(rows), layout.returned.hidden));
  for (auto item = static_cast<std::size_t>(w.index()); item < rows * parts; item += static_cast<std::size_t>(w.count())) {
    const std::size_t row = item / parts;
    const auto term = [&](int d) { return w.live(d) ? SumTerm{heap.at<std::byte>(d, layout.partial(first + row))} : SumTerm{}; };
    w.reduce_rows(out + row * hidden, heap.ranks, term, SumFormat{layout.returned, false}, shared.of(row, hidden),
                  static_cast<int>(item % parts), static_cast<int>(parts));
  }
  return w.team_barrier();
}

}  // namespace heddle
