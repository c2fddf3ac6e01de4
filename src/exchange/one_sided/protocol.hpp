// one_sided, the protocol (docs/protocols/one_sided.md). Dispatch pushes each token once to each rank
// that needs it, then one flag a rank that carries the count; combine lets the home ranks pull.
#pragma once

#include "exchange/arrivals.hpp"
#include "exchange/one_sided/layout.hpp"

namespace heddle {

/// Ordinary memory of one rank for a round trip.
struct OneSidedScratch {
  Numbering sent;                                                   ///< where each token went, see number_rows_by_rank
  std::int32_t* arrived = nullptr;                                  ///< [ranks]: rows from each rank
  const std::byte* extra[OneSidedLayout::max_extra_payloads] = {};  ///< [tokens, extra_bytes] each
};

template <Worker W>
HEDDLE_PROTOCOL bool one_sided_send(W& w, const OneSidedLayout& layout, int block_rows, const SendInput& input,
                                    const PlacementView& placement, const OneSidedScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  RankNumbers rows;
  if (!number_rows_by_rank(w, input, placement, scratch.sent, rows)) return false;
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    // The place of something of this token at rank d; null where the token does not go.
    const auto at = [&](int d, auto offset_of) {
      const std::int32_t slot = rows.slots[token * heap.ranks + d];
      return slot < 0 ? nullptr : heap.at<std::byte>(d, offset_of(OneSidedLayout::row_number(heap.rank, block_rows, slot)));
    };
    const auto row = [&](int d) { return at(d, [&](std::size_t number) { return layout.row(number); }); };
    const auto routing = [&](int d) { return at(d, [&](std::size_t number) { return layout.routing(number); }); };
    send_row(w, heap.ranks, row, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire,
             part_of(item, bits));
    if (!part_of(item, bits).last()) continue;
    send_routing(w, heap.ranks, routing, input, token);
    for (int p = 0; p < layout.extra_payloads; ++p) {
      const std::size_t bytes = layout.extra_bytes[p];
      const auto extra = [&](int d) {
        return reinterpret_cast<std::uint32_t*>(at(d, [&](std::size_t number) { return layout.extra(p, number); }));
      };
      send_values(w, heap.ranks, extra,
                  reinterpret_cast<const std::uint32_t*>(scratch.extra[p] + static_cast<std::size_t>(token) * bytes),
                  static_cast<int>(bytes / sizeof(std::uint32_t)));
    }
  }
  tell(
      w, [&](int peer) { return layout.arrived_word(peer); }, [&](int d) { return rows.counts[d]; });
  return true;
}

/// Waits for every live rank's flag: rows from each rank, or null on abort. Rows past a source's count are padding; the
/// routing they show is made "no expert" by the reader, who knows the counts.
template <Worker W>
HEDDLE_PROTOCOL const std::int32_t* one_sided_receive(W& w, const OneSidedLayout& layout, const OneSidedScratch& scratch) {
  if (!w.begin()) return nullptr;
  return hear(
      w, [&](int peer) { return layout.arrived_word(peer); }, WordKind::one_sided_arrived, scratch.arrived);
}

/// Routing of all block rows in ordinary memory, padding marked as "no expert".
template <Worker W, class Count = NotCounted>
HEDDLE_PROTOCOL void one_sided_list(W& w, const OneSidedLayout& layout, int block_rows, const PlacementView& placement,
                                    const std::int32_t* arrived, const ArrivedRouting& routing, const Count& count = {}) {
  const HeapView heap = w.heap();
  const auto routing_of = [&](int row) {
    int source = 0;
    int slot = row;
    for (; slot >= block_rows; ++source) slot -= block_rows;
    const bool real = slot < arrived[source];
    return real ? heap.template mine<std::byte>(layout.routing(static_cast<std::size_t>(row))) : nullptr;
  };
  list_routing(w, heap.ranks * block_rows, routing_of, placement, routing, count);
}

/// results [ranks * block_rows, H]: this rank's partial sums, for the others to pull. Where they were not made in the
/// block itself they are laid there.
template <Worker W>
HEDDLE_PROTOCOL bool one_sided_offer(W& w, const OneSidedLayout& layout, int block_rows, const bf16* results,
                                     const OneSidedScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto ready = [&](int peer) { return layout.ready_word(peer); };
  const auto yes = [](int) { return 1; };
  if (results == heap.mine<bf16>(layout.result(0))) {
    tell_at_once(w, ready, yes);
    return true;
  }
  const int bits = w.part_bits(w.sum_values(heap.ranks, scratch.arrived), layout.returned.hidden);
  const auto arrived = [&](int s) { return scratch.arrived[s]; };
  w.deal(heap.ranks, heap.ranks, bits, arrived, [&](int s, int slot, int, const RowPart& part) {
    const std::size_t number = OneSidedLayout::row_number(s, block_rows, slot);
    const auto to = [&](int) { return heap.mine<std::byte>(layout.result(number)); };
    send_row(w, 1, to, results + number * static_cast<std::size_t>(layout.returned.hidden), layout.returned, part);
  });
  tell(w, ready, yes);
  return true;
}

/// out [tokens, H] = sum of the partial rows of a token's ranks, in ascending rank order; `shared` is added last.
template <Worker W>
HEDDLE_PROTOCOL bool one_sided_pull(W& w, const OneSidedLayout& layout, int block_rows, const SendInput& input,
                                    const OneSidedScratch& scratch, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  if (!hear_all(
          w, [&](int peer) { return layout.ready_word(peer); }, WordKind::one_sided_ready))
    return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto slots = side_by_side(w, heap.ranks, [&](int d) { return scratch.sent.numbers[token * heap.ranks + d]; });
    const auto term = [&](int d) {
      const std::int32_t slot = slots(d);
      if (slot < 0) return SumTerm{};
      return SumTerm{heap.at<std::byte>(d, layout.result(OneSidedLayout::row_number(heap.rank, block_rows, slot)))};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, heap.ranks, term, SumFormat{layout.returned, false},
                  shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
