// What every way's sending side shares: the input of one rank, where experts live, which ranks a token
// goes to and the number of each row among the sender's own (exact placement: never from a race).
#pragma once

#include <cstdint>

#include "exchange/areas.hpp"
#include "signal/worker.hpp"

namespace heddle {

/// Tokens that a warp numbers by rank at a time, and pairs that it numbers by expert.
constexpr int rank_numbering_chunk = 32;
constexpr int expert_numbering_chunk = 256;

/// One rank's tokens, in its ordinary memory.
struct SendInput {
  int tokens = 0;
  int topk = 1;
  const bf16* hidden = nullptr;       ///< [tokens, H]
  const std::int32_t* ids = nullptr;  ///< [tokens, topk], -1: no expert
  const float* weights = nullptr;     ///< [tokens, topk]
};

/// The shared expert's results, added last to the sums: rows [tokens, H] (null: none) and, where it is
/// gated, a factor a token (null: 1).
struct SharedRows {
  const bf16* rows = nullptr;
  const float* factors = nullptr;

  HEDDLE_HOST_DEVICE LastTerm of(std::size_t token, std::size_t hidden) const {
    if (rows == nullptr) return {};
    return {rows + token * hidden, factors == nullptr ? 1.0f : factors[token]};
  }
};

/// The placement as arrays.
struct PlacementView {
  const int* rank_of = nullptr;      ///< [experts]
  const int* local_index = nullptr;  ///< [experts]
  const int* experts_on = nullptr;   ///< [ranks]: how many experts each rank holds
};

/// Does a token have an expert on `rank`?
HEDDLE_HOST_DEVICE inline bool goes_to(const SendInput& input, const PlacementView& placement, int token, int rank) {
  for (int choice = 0; choice < input.topk; ++choice) {
    const std::int32_t id = input.ids[token * input.topk + choice];
    if (id >= 0 && placement.rank_of[id] == rank) return true;
  }
  return false;
}

/// This rank's place among the live ranks, which share out work that any of them could do.
struct LiveShare {
  std::size_t position = 0;
  std::size_t count = 0;
};

template <Worker W>
HEDDLE_PROTOCOL LiveShare live_share(const W& w) {
  LiveShare share;
  for (int rank = 0; rank < w.heap().ranks; ++rank) {
    if (!w.live(rank)) continue;
    if (rank < w.heap().rank) ++share.position;
    ++share.count;
  }
  return share;
}

/// A rendezvous: every rank tells all live ranks by one word each, then hears from all of them. word_of(peer) is
/// the offset of the word that `peer` writes. tell_all gives all the same value, tell_each values[peer].
template <Worker W, class WordOf>
HEDDLE_PROTOCOL void tell_all(W& w, WordOf word_of, std::uint32_t value) {
  const HeapView& heap = w.heap();
  for (int d = w.index(); d < heap.ranks; d += w.count()) {
    if (w.live(d)) w.publish(heap.at<Word>(d, word_of(heap.rank)), value);
  }
}
template <Worker W, class WordOf>
HEDDLE_PROTOCOL void tell_each(W& w, WordOf word_of, const std::int32_t* values) {
  const HeapView& heap = w.heap();
  for (int d = w.index(); d < heap.ranks; d += w.count()) {
    if (w.live(d)) w.publish(heap.at<Word>(d, word_of(heap.rank)), static_cast<std::uint32_t>(values[d]));
  }
}
/// values[s], if wanted, is what rank s told; 0 where it is not live. Ends with a barrier, false on abort.
template <Worker W, class WordOf>
HEDDLE_PROTOCOL bool hear_all(W& w, WordOf word_of, WordKind kind, std::int32_t* values = nullptr) {
  const HeapView& heap = w.heap();
  for (int s = w.index(); s < heap.ranks; s += w.count()) {
    std::uint32_t value = 0;
    if (w.live(s) && !w.acquire(heap.mine<Word>(word_of(s)), {kind, s, -1}, value)) return false;
    if (values != nullptr) values[s] = static_cast<std::int32_t>(value);
  }
  return w.team_barrier();
}

/// Numbers the items i < n of every class, in order: found(i, class, number) for those with wanted(i, class);
/// totals[class] = how many. Where one worker a class would be too slow, items are numbered in chunks side by
/// side: number is then that within the chunk, and before[i / chunk * classes + class] is to be added. `chunk` as
/// w.chunk() gave it; clear(first, items, class) comes first, from the worker that will number them. Returns
/// false on abort; ends with a barrier.
template <Worker W, class Clear, class Wanted, class Found>
HEDDLE_PROTOCOL bool number_by_class(W& w, int n, int classes, int chunk, std::int32_t* before, std::int32_t* totals, Clear clear,
                                     Wanted wanted, Found found) {
  const auto number = [&](int first, int items, int c) {
    clear(first, items, c);
    return w.enumerate(
        items, [&](int i) { return wanted(first + i, c); }, [&](int i, int i_number) { found(first + i, c, i_number); });
  };
  if (n <= chunk) {
    for (int c = w.index(); c < classes; c += w.count()) totals[c] = number(0, n, c);
    return w.team_barrier();
  }
  const int chunks = (n + chunk - 1) / chunk;
  for (int part = w.index(); part < chunks; part += w.count()) {
    const int first = part * chunk;
    const int items = n - first < chunk ? n - first : chunk;
    for (int c = 0; c < classes; ++c) before[part * classes + c] = number(first, items, c);
  }
  if (!w.team_barrier()) return false;
  for (int c = w.index(); c < classes; c += w.count()) totals[c] = w.prefix_sums(chunks, before + c, classes);
  return w.team_barrier();
}

/// slots[token * ranks + d] = the number of earlier tokens of this sender that go to rank d, or -1 if
/// the token does not go there; counts[d] = how many go. Dead ranks get none. `before`: [chunks, ranks],
/// used by GPUs only. Ends with a barrier.
template <Worker W>
HEDDLE_PROTOCOL bool number_rows_by_rank(W& w, const SendInput& input, const PlacementView& placement, std::int32_t* slots,
                                         std::int32_t* counts, std::int32_t* before) {
  const int ranks = w.heap().ranks;
  const int chunk = w.chunk(rank_numbering_chunk, input.tokens);
  const auto clear = [&](int first, int items, int d) { w.lanes(items, [&](int i) { slots[(first + i) * ranks + d] = -1; }); };
  const auto wanted = [&](int token, int d) { return w.live(d) && goes_to(input, placement, token, d); };
  const auto found = [&](int token, int d, int number) { slots[token * ranks + d] = number; };
  if (!number_by_class(w, input.tokens, ranks, chunk, before, counts, clear, wanted, found)) return false;
  if (input.tokens <= chunk) return true;
  for (int token = w.index(); token < input.tokens; token += w.count()) {
    w.lanes(ranks, [&](int d) {
      if (slots[token * ranks + d] >= 0) slots[token * ranks + d] += before[token / chunk * ranks + d];
    });
  }
  return w.team_barrier();
}

/// A row in wire format, ready to be copied to any number of ranks: the row itself where it travels as
/// bf16, otherwise quantised once into this worker's staging row.
template <Worker W>
HEDDLE_PROTOCOL const std::byte* row_to_send(W& w, const bf16* row, const RowFormat& format) {
  if (format.wire == Wire::bf16) return reinterpret_cast<const std::byte*>(row);
  std::byte* staged = w.staging(format);
  w.complete(w.quantise_row(staged, row, format));
  return staged;
}

/// A token's routing: its k ids, then its k weights (routing_bytes of room).
template <Worker W>
HEDDLE_PROTOCOL void send_routing(W& w, std::byte* to, const SendInput& input, int token) {
  const std::size_t list_bytes = static_cast<std::size_t>(input.topk) * sizeof(std::int32_t);
  w.copy_bytes(to, input.ids + token * input.topk, list_bytes);
  w.copy_bytes(to + list_bytes, input.weights + token * input.topk, list_bytes);
}

}  // namespace heddle
