// one_sided, the protocol (docs/protocols/one_sided.md). Dispatch pushes each token once to each rank
// that needs it, then one flag a rank that carries the count; combine lets the home ranks pull.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/one_sided/layout.hpp"

namespace heddle {

/// Ordinary memory of one rank for a round trip.
struct OneSidedScratch {
  std::int32_t* slots = nullptr;                                    ///< [tokens, ranks]: where each token went
  std::int32_t* sent = nullptr;                                     ///< [ranks]: rows to each rank
  std::int32_t* arrived = nullptr;                                  ///< [ranks]: rows from each rank
  const std::byte* extra[OneSidedLayout::max_extra_payloads] = {};  ///< [tokens, extra_bytes] each
  std::int32_t* before = nullptr;                                   ///< GPUs only: [chunks of tokens, ranks]
};

template <Worker W>
HEDDLE_PROTOCOL bool one_sided_send(W& w, const OneSidedLayout& layout, int block_rows, const SendInput& input,
                                    const PlacementView& placement, const OneSidedScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  if (!number_rows_by_rank(w, input, placement, scratch.slots, scratch.sent, scratch.before)) return false;
  for (int token = w.index(); token < input.tokens; token += w.count()) {
    const std::byte* row = nullptr;
    for (int d = 0; d < heap.ranks; ++d) {
      const std::int32_t slot = scratch.slots[token * heap.ranks + d];
      if (slot < 0) continue;
      if (row == nullptr) row = row_to_send(w, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire);
      const std::size_t number = OneSidedLayout::row_number(heap.rank, block_rows, slot);
      w.copy_row(heap.at<std::byte>(d, layout.row(number)), row, layout.wire);
      send_routing(w, heap.at<std::byte>(d, layout.routing(number)), input, token);
      for (int p = 0; p < layout.extra_payloads; ++p) {
        const std::size_t bytes = layout.extra_bytes[p];
        w.copy_bytes(heap.at<std::byte>(d, layout.extra(p, number)), scratch.extra[p] + static_cast<std::size_t>(token) * bytes,
                     bytes);
      }
    }
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.arrived_word(peer); };
  tell_each(w, word, scratch.sent);
  return true;
}

/// Waits for every live rank's flag. Rows past a source's count are padding; the routing they show is
/// made "no expert" by the reader, who knows the counts.
template <Worker W>
HEDDLE_PROTOCOL bool one_sided_receive(W& w, const OneSidedLayout& layout, const OneSidedScratch& scratch) {
  if (!w.begin()) return false;
  const auto word = [&](int peer) { return layout.arrived_word(peer); };
  return hear_all(w, word, WordKind::one_sided_arrived, scratch.arrived);
}

/// Routing of all block rows in ordinary memory, padding marked as "no expert".
template <Worker W>
HEDDLE_PROTOCOL bool one_sided_list(W& w, const OneSidedLayout& layout, int block_rows, const PlacementView& placement,
                                    const OneSidedScratch& scratch, const ArrivedRouting& routing) {
  const HeapView& heap = w.heap();
  const auto block = [&](int) { return block_rows; };
  w.deal(heap.ranks, heap.ranks, block, [&](int s, int slot, int) {
    const std::size_t number = OneSidedLayout::row_number(s, block_rows, slot);
    const bool real = slot < scratch.arrived[s];
    take_routing(w, routing, number, real ? heap.template mine<std::byte>(layout.routing(number)) : nullptr, placement);
  });
  return w.team_barrier();
}

/// results [ranks * block_rows, H]: this rank's partial sums, laid into its own block for the others.
template <Worker W>
HEDDLE_PROTOCOL bool one_sided_offer(W& w, const OneSidedLayout& layout, int block_rows, const bf16* results,
                                     const OneSidedScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto arrived = [&](int s) { return scratch.arrived[s]; };
  w.deal(heap.ranks, heap.ranks, arrived, [&](int s, int slot, int) {
    const std::size_t number = OneSidedLayout::row_number(s, block_rows, slot);
    const std::byte* row = row_to_send(w, results + number * static_cast<std::size_t>(layout.returned.hidden), layout.returned);
    w.copy_row(heap.mine<std::byte>(layout.result(number)), row, layout.returned);
  });
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.ready_word(peer); };
  tell_all(w, word, 1);
  return true;
}

/// out [tokens, H] = sum of the partial rows of a token's ranks, in ascending rank order; `shared` is added last.
template <Worker W>
HEDDLE_PROTOCOL bool one_sided_pull(W& w, const OneSidedLayout& layout, int block_rows, const SendInput& input,
                                    const OneSidedScratch& scratch, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const auto word = [&](int peer) { return layout.ready_word(peer); };
  if (!hear_all(w, word, WordKind::one_sided_ready)) return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int parts = w.row_parts(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens * parts; item += w.count()) {
    const int token = item / parts;
    const auto term = [&](int d) {
      const std::int32_t slot = scratch.slots[token * heap.ranks + d];
      if (slot < 0) return SumTerm{};
      return SumTerm{heap.at<std::byte>(d, layout.result(OneSidedLayout::row_number(heap.rank, block_rows, slot)))};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, heap.ranks, term, SumFormat{layout.returned, false},
                  shared.of(static_cast<std::size_t>(token), hidden), item % parts, parts);
  }
  return w.team_barrier();
}

}  // namespace heddle
