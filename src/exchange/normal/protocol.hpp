// normal, the protocol (docs/protocols/normal.md). Counts are exchanged first and the host reads them;
// then each worker moves rows for its share of the peers in both directions, never blocking in one while
// the other could go on, so bounded queues cannot deadlock whatever the routing.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/normal/layout.hpp"

namespace heddle {

/// How far the two directions of one flow with one peer are.
struct NormalProgress {
  std::uint32_t sent = 0;   ///< rows pushed to the peer
  std::uint32_t taken = 0;  ///< rows taken from the peer
  bool told = false;        ///< a tail has been published, if only that of an empty queue
  bool heard = false;       ///< a tail has been seen
};

/// Ordinary memory of one rank for a round trip.
struct NormalScratch {
  Numbering sent;                           ///< where each token goes, see number_rows_by_rank
  std::int32_t* arrived = nullptr;          ///< [ranks]: rows from each rank
  const std::byte* rows_to_send = nullptr;  ///< [tokens] wire rows (the hidden states themselves with a bf16 wire)
  std::int32_t* tokens = nullptr;           ///< [ranks, cap]: the token of each row to a rank
  NormalProgress* progress = nullptr;       ///< [flows, ranks]
};

/// Tells every rank how many rows will come; after it the host knows the exact sizes.
template <Worker W>
HEDDLE_PROTOCOL bool normal_exchange_counts(W& w, const NormalLayout& layout, const SendInput& input,
                                            const PlacementView& placement, const NormalScratch& scratch) {
  if (!w.begin()) return false;
  RankNumbers rows;
  if (!number_rows_by_rank(w, input, placement, scratch.sent, rows)) return false;
  const int ranks = w.heap().ranks;
  for (int first = 0; first < ranks; first += most_spread_columns) {
    const int some = ranks - first < most_spread_columns ? ranks - first : most_spread_columns;
    w.spread(input.tokens, some, [&](int token, int column) {
      const int d = first + column;
      const std::int32_t slot = rows.slots[token * ranks + d];
      if (slot >= 0) scratch.tokens[d * layout.shape.cap + slot] = token;
    });
  }
  const auto word = [&](int peer) { return layout.count_word(peer); };
  tell(w, word, [&](int d) { return rows.counts[d]; });
  return hear(w, word, WordKind::normal_count, scratch.arrived) != nullptr;
}

/// The words and sizes of one direction pair, so that dispatch and combine share one mover.
struct NormalFlow {
  WordKind tail_kind = WordKind::normal_tail;
  WordKind head_kind = WordKind::normal_head;
  int chunk_rows = 1;
  int rows = 1;  ///< that one flow holds
  int flows = 1;

  /// How many of `total` rows go by a flow.
  HEDDLE_HOST_DEVICE std::uint32_t share(std::int32_t total, int flow) const {
    return static_cast<std::uint32_t>((total - flow + flows - 1) / flows);
  }
};

/// Pushes up to a chunk to one peer if its queue has room. push(number) writes row `number` into the queue.
template <Worker W, class Push>
HEDDLE_PROTOCOL bool push_chunk(W& w, const NormalFlow& flow, Word* tail, const Word* head, std::uint32_t total,
                                NormalProgress& progress, Push push) {
  if (progress.sent == total && progress.told) return false;
  std::uint32_t taken = 0;
  if (!w.peek(head, taken)) taken = 0;
  const std::uint32_t room = static_cast<std::uint32_t>(flow.rows) - (progress.sent - taken);
  std::uint32_t rows = total - progress.sent;
  if (rows > room) rows = room;
  if (rows > static_cast<std::uint32_t>(flow.chunk_rows)) rows = static_cast<std::uint32_t>(flow.chunk_rows);
  if (rows == 0 && (progress.told || total != 0)) return false;
  for (std::uint32_t i = 0; i < rows; ++i) push(progress.sent + i);
  w.complete_all();
  progress.sent += rows;
  progress.told = true;
  w.publish(tail, progress.sent);
  return true;
}

/// Takes what one peer has published. take(number) copies row `number` out of the queue.
template <Worker W, class Take>
HEDDLE_PROTOCOL bool take_rows(W& w, const Word* tail, Word* head, std::uint32_t total, NormalProgress& progress, Take take) {
  std::uint32_t there = 0;
  if (progress.heard && progress.taken == total) return false;
  if (!w.peek(tail, there)) return false;
  if (there > total) there = total;
  const bool first = !progress.heard;
  progress.heard = true;
  if (there == progress.taken) return first;
  for (std::uint32_t number = progress.taken; number < there; ++number) take(number);
  w.complete_all();
  progress.taken = there;
  w.publish(head, progress.taken);
  return true;
}

/// What a transfer with one peer waits for: rows (or the word that there are none), or room in its queue.
struct NormalStop {
  WordKind kind = WordKind::none;
  Word expected = 0;
  Word seen = 0;
};

HEDDLE_HOST_DEVICE inline NormalStop where_stuck(std::uint32_t epoch, const NormalFlow& flow, const NormalProgress& progress,
                                                 std::uint32_t to_send, std::uint32_t to_take) {
  if (progress.taken < to_take || progress.sent == to_send) {
    return {flow.tail_kind, pack_word(epoch, to_take), progress.heard ? pack_word(epoch, progress.taken) : 0};
  }
  const std::uint32_t full_since = progress.sent - static_cast<std::uint32_t>(flow.rows);
  return {flow.head_kind, pack_word(epoch, full_since + 1), pack_word(epoch, full_since)};
}

/// Moves both directions of this worker's flows until all is sent and taken. to_send, to_take: [ranks]; progress: [flows,
/// ranks]. Words gives tails and heads by peer, a word a flow; push(peer, number), take(peer, number). Flows without a row
/// have nothing to say, but for the first, which tells that there is none.
template <Worker W, class Words, class Push, class Take>
HEDDLE_PROTOCOL bool move_rows(W& w, const NormalFlow& flow, const Words& words, const std::int32_t* to_send,
                               const std::int32_t* to_take, NormalProgress* progress, Push push, Take take) {
  const int ranks = w.heap().ranks;
  const int all = ranks * flow.flows;
  for (int x = w.index(); x < all; x += w.count()) progress[x] = {};
  auto patience = w.look();
  for (;;) {
    bool moved = false;
    int waiting_for = -1;
    for (int x = w.index(); x < all; x += w.count()) {
      const int p = x % ranks;
      const int f = x / ranks;
      if (!w.live(p)) continue;
      const std::uint32_t send = flow.share(to_send[p], f);
      const std::uint32_t receive = flow.share(to_take[p], f);
      NormalProgress mine = progress[x];
      const auto number = [&](std::uint32_t turn) {
        return turn * static_cast<std::uint32_t>(flow.flows) + static_cast<std::uint32_t>(f);
      };
      if (send > 0 || f == 0) {
        moved |= push_chunk(w, flow, words.their_tail(p) + f, words.my_head(p) + f, send, mine,
                            [&](std::uint32_t turn) { push(p, number(turn)); });
      }
      if (receive > 0 || f == 0) {
        moved |= take_rows(w, words.my_tail(p) + f, words.their_head(p) + f, receive, mine,
                           [&](std::uint32_t turn) { take(p, number(turn)); });
      }
      if (mine.sent < send || mine.taken < receive || (f == 0 && !mine.heard)) waiting_for = x;
      progress[x] = mine;
    }
    if (waiting_for < 0) {
      w.note_rests();
      return w.team_barrier();
    }
    if (moved) {
      patience = w.look();
      w.note_progress();
      continue;
    }
    const int peer = waiting_for % ranks;
    const int f = waiting_for / ranks;
    const NormalStop stop =
        where_stuck(w.epoch(), flow, progress[waiting_for], flow.share(to_send[peer], f), flow.share(to_take[peer], f));
    if (!w.rest(patience, {stop.kind, peer, -1}, stop.expected, stop.seen)) {
      w.team_barrier();  // nobody leaves before the others are there
      return false;
    }
  }
}

struct NormalDispatchWords {
  const HeapView& heap;
  const NormalLayout& layout;
  HEDDLE_PROTOCOL Word* their_tail(int p) const { return heap.at<Word>(p, layout.tail_word(heap.rank)); }
  HEDDLE_PROTOCOL const Word* my_head(int p) const { return heap.mine<Word>(layout.head_word(p)); }
  HEDDLE_PROTOCOL const Word* my_tail(int p) const { return heap.mine<Word>(layout.tail_word(p)); }
  HEDDLE_PROTOCOL Word* their_head(int p) const { return heap.at<Word>(p, layout.head_word(heap.rank)); }
};

struct NormalReturnWords {
  const HeapView& heap;
  const NormalLayout& layout;
  HEDDLE_PROTOCOL Word* their_tail(int p) const { return heap.at<Word>(p, layout.return_tail_word(heap.rank)); }
  HEDDLE_PROTOCOL const Word* my_head(int p) const { return heap.mine<Word>(layout.return_head_word(p)); }
  HEDDLE_PROTOCOL const Word* my_tail(int p) const { return heap.mine<Word>(layout.return_tail_word(p)); }
  HEDDLE_PROTOCOL Word* their_head(int p) const { return heap.at<Word>(p, layout.return_head_word(heap.rank)); }
};

/// Dispatch: rows [n] in (source, token) order, with their routing, into ordinary memory of the exact size.
template <Worker W, class Count = NotCounted>
HEDDLE_PROTOCOL bool normal_dispatch(W& w, const NormalLayout& layout, const SendInput& input, const PlacementView& placement,
                                     const NormalScratch& scratch, const std::int32_t* firsts, std::byte* rows,
                                     const ArrivedRouting& routing, const Count& count = {}) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto push = [&](int d, std::uint32_t number) {
    const std::int32_t token = scratch.tokens[static_cast<std::uint32_t>(d * layout.shape.cap) + number];
    auto* record = heap.at<std::byte>(d, layout.record(heap.rank, number));
    w.copy_row(record, scratch.rows_to_send + static_cast<std::size_t>(token) * layout.wire.row_bytes(), layout.wire);
    send_routing(
        w, 1, [&](int) { return record + layout.wire.row_bytes(); }, input, token);
  };
  const auto take = [&](int s, std::uint32_t number) {
    const std::size_t i = static_cast<std::size_t>(firsts[s]) + number;
    const auto* record = heap.mine<std::byte>(layout.record(s, number));
    w.copy_row(rows + i * layout.wire.row_bytes(), record, layout.wire);
    take_routing(w, routing, i, record + layout.wire.row_bytes(), placement, count);
  };
  const NormalFlow flow{WordKind::normal_tail, WordKind::normal_head, layout.chunk_rows, layout.flow_rows(), layout.flows};
  return move_rows(w, flow, NormalDispatchWords{heap, layout}, scratch.sent.totals, scratch.arrived, scratch.progress, push, take);
}

/// Combine: sums [n, H] (one a row that arrived, in that order) go back; returned holds, for rank d, its
/// rows at [returned_firsts[d] + slot].
template <Worker W>
HEDDLE_PROTOCOL bool normal_return(W& w, const NormalLayout& layout, const NormalScratch& scratch, const std::int32_t* firsts,
                                   const bf16* sums, const std::int32_t* returned_firsts, std::byte* returned) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto push = [&](int home, std::uint32_t number) {
    const std::size_t i = static_cast<std::size_t>(firsts[home]) + number;
    const auto to = [&](int) { return heap.at<std::byte>(home, layout.result(heap.rank, number)); };
    send_row(w, 1, to, sums + i * static_cast<std::size_t>(layout.returned.hidden), layout.returned);
  };
  const auto take = [&](int d, std::uint32_t number) {
    const std::size_t i = static_cast<std::size_t>(returned_firsts[d]) + number;
    w.copy_row(returned + i * layout.returned.row_bytes(), heap.mine<std::byte>(layout.result(d, number)), layout.returned);
  };
  const NormalFlow flow{WordKind::normal_return_tail, WordKind::normal_return_head, layout.chunk_rows, layout.flow_rows(),
                        layout.flows};
  return move_rows(w, flow, NormalReturnWords{heap, layout}, scratch.arrived, scratch.sent.totals, scratch.progress, push, take);
}

/// out [tokens, H] = sum over ranks, ascending, of the rows they returned.
template <Worker W>
HEDDLE_PROTOCOL bool normal_collect(W& w, const NormalLayout& layout, const SendInput& input, const NormalScratch& scratch,
                                    const std::int32_t* returned_firsts, const std::byte* returned, const SharedRows& shared,
                                    bf16* out) {
  if (!w.begin()) return false;
  const int ranks = w.heap().ranks;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto term = [&](int d) {
      const std::int32_t slot = scratch.sent.numbers[token * ranks + d];
      if (slot < 0) return SumTerm{};
      return SumTerm{returned + static_cast<std::size_t>(returned_firsts[d] + slot) * layout.returned.row_bytes()};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, ranks, term, SumFormat{layout.returned, false},
                  shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
