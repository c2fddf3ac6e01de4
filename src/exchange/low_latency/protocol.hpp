// low_latency, the protocol (docs/protocols/low_latency.md): four halves that may be called apart, so
// that an engine can do other work between sending and receiving. Dead ranks are skipped everywhere.
#pragma once

#include "exchange/low_latency/layout.hpp"
#include "exchange/sending.hpp"

namespace heddle {

/// Ordinary memory of one rank for a round trip. An expert's block has room for ranks * cap rows.
struct LowLatencyScratch {
  std::int32_t* slots = nullptr;    ///< [tokens, topk]: number of each pair among this sender's of its expert
  std::int32_t* sent = nullptr;     ///< [experts]: pairs a expert
  std::int32_t* arrived = nullptr;  ///< [local experts (at least 1), ranks]: rows of each region
  // The masked layout that the experts read: rows of expert e at e * block_rows, packed in source order.
  int block_rows = 0;
  std::byte* rows = nullptr;       ///< [local experts, block_rows] in wire format
  PairOrigin* origins = nullptr;   ///< likewise
  float* weights = nullptr;        ///< likewise
  std::int32_t* counts = nullptr;  ///< [local experts] (masked_m)
};

template <Worker W>
HEDDLE_PROTOCOL bool low_latency_send(W& w, const LowLatencyLayout& layout, const SendInput& input, const PlacementView& placement,
                                      const LowLatencyScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const int pairs = input.tokens * input.topk;
  for (int e = w.index(); e < layout.shape.experts; e += w.count()) {
    scratch.sent[e] = w.enumerate(
        pairs, [&](int pair) { return input.ids[pair] == e; }, [&](int pair, int number) { scratch.slots[pair] = number; });
  }
  if (!w.team_barrier()) return false;
  for (int token = w.index(); token < input.tokens; token += w.count()) {
    const std::byte* row = nullptr;
    for (int choice = 0; choice < input.topk; ++choice) {
      const int pair = token * input.topk + choice;
      const std::int32_t id = input.ids[pair];
      if (id < 0 || !w.live(placement.rank_of[id])) continue;
      if (row == nullptr) row = row_to_send(w, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire);
      const std::size_t number = layout.row_number(placement.local_index[id], heap.rank, scratch.slots[pair]);
      w.copy_row(heap.at<std::byte>(placement.rank_of[id], layout.row(number)), row, layout.wire);
      const PairOrigin origin{pair, input.weights[pair]};
      w.copy_bytes(heap.at<std::byte>(placement.rank_of[id], layout.origin(number)), &origin, sizeof origin);
    }
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  for (int e = w.index(); e < layout.shape.experts; e += w.count()) {
    const int d = placement.rank_of[e];
    if (!w.live(d)) continue;
    w.publish(heap.at<Word>(d, layout.count_word(placement.local_index[e], heap.rank)),
              static_cast<std::uint32_t>(scratch.sent[e]));
  }
  // A rank without experts hears from everybody too: otherwise it could be a call ahead of its peers.
  for (int d = w.index(); d < heap.ranks; d += w.count()) {
    if (w.live(d) && placement.experts_on[d] == 0) w.publish(heap.at<Word>(d, layout.count_word(0, heap.rank)), 0);
  }
  return true;
}

/// Waits for every live source's counts; the rows are there after it.
template <Worker W>
HEDDLE_PROTOCOL bool low_latency_hear(W& w, const LowLatencyLayout& layout, int local_experts, const LowLatencyScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const int heard = local_experts > 0 ? local_experts : 1;
  for (int region = w.index(); region < heard * heap.ranks; region += w.count()) {
    const int e = region / heap.ranks;
    const int s = region % heap.ranks;
    std::uint32_t count = 0;
    if (w.live(s) && !w.acquire(heap.mine<Word>(layout.count_word(e, s)), {WordKind::low_latency_count, s, e}, count)) return false;
    scratch.arrived[region] = static_cast<std::int32_t>(count);
  }
  return w.team_barrier();
}

/// Packs each expert's rows in source order.
template <Worker W>
HEDDLE_PROTOCOL bool low_latency_pack(W& w, const LowLatencyLayout& layout, int local_experts, const LowLatencyScratch& scratch) {
  const HeapView& heap = w.heap();
  const int ranks = heap.ranks;
  const auto arrived = [&](int region) { return scratch.arrived[region]; };
  w.deal(local_experts * ranks, ranks, arrived, [&](int region, int slot, int before) {
    const int e = region / ranks;
    const std::size_t from = layout.row_number(e, region % ranks, slot);
    const auto to = static_cast<std::size_t>(e * scratch.block_rows + before + slot);
    w.copy_row(scratch.rows + to * layout.wire.row_bytes(), heap.mine<std::byte>(layout.row(from)), layout.wire);
    w.complete(w.copy_bytes(&scratch.origins[to], heap.mine<std::byte>(layout.origin(from)), sizeof(PairOrigin)));
    scratch.weights[to] = scratch.origins[to].weight;
  });
  if (w.index() == 0) {
    w.lanes(local_experts, [&](int e) {
      int rows = 0;
      for (int s = 0; s < ranks; ++s) rows += scratch.arrived[e * ranks + s];
      scratch.counts[e] = rows;
    });
  }
  w.complete_all();
  return w.team_barrier();
}

template <Worker W>
HEDDLE_PROTOCOL bool low_latency_receive(W& w, const LowLatencyLayout& layout, int local_experts,
                                         const LowLatencyScratch& scratch) {
  return low_latency_hear(w, layout, local_experts, scratch) && low_latency_pack(w, layout, local_experts, scratch);
}

/// results [local experts, block_rows, H]: each row returns to the slot of its choice at its home.
template <Worker W>
HEDDLE_PROTOCOL bool low_latency_return(W& w, const LowLatencyLayout& layout, int local_experts, const bf16* results,
                                        const LowLatencyScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const int ranks = heap.ranks;
  const auto arrived = [&](int region) { return scratch.arrived[region]; };
  w.deal(local_experts * ranks, ranks, arrived, [&](int region, int slot, int before) {
    const auto number = static_cast<std::size_t>(region / ranks * scratch.block_rows + before + slot);
    const std::byte* row = row_to_send(w, results + number * static_cast<std::size_t>(layout.returned.hidden), layout.returned);
    const auto pair = static_cast<std::size_t>(scratch.origins[number].pair);
    w.copy_row(heap.at<std::byte>(region % ranks, layout.slot(pair)), row, layout.returned);
  });
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.returned_word(peer); };
  tell_all(w, word, 1);
  return true;
}

/// out [tokens, H] = sum of a token's slots in choice order, choices without an expert or on a dead rank
/// left out; with `weighted` each is multiplied by its routing weight. `shared` is added last.
template <Worker W>
HEDDLE_PROTOCOL bool low_latency_collect(W& w, const LowLatencyLayout& layout, const SendInput& input,
                                         const PlacementView& placement, bool weighted, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto word = [&](int peer) { return layout.returned_word(peer); };
  if (!hear_all(w, word, WordKind::low_latency_returned)) return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int parts = w.row_parts(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens * parts; item += w.count()) {
    const int token = item / parts;
    const auto term = [&](int choice) {
      const int pair = token * input.topk + choice;
      const std::int32_t id = input.ids[pair];
      if (id < 0 || !w.live(placement.rank_of[id])) return SumTerm{};
      return SumTerm{heap.mine<std::byte>(layout.slot(static_cast<std::size_t>(pair))), input.weights[pair]};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, input.topk, term, SumFormat{layout.returned, weighted},
                  shared.of(static_cast<std::size_t>(token), hidden), item % parts, parts);
  }
  return w.team_barrier();
}

}  // namespace heddle
