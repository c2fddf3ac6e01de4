// low_latency, the protocol (docs/protocols/low_latency.md): four halves that may be called apart, so
// that an engine can do other work between sending and receiving. Dead ranks are skipped everywhere.
#pragma once

#include "exchange/low_latency/layout.hpp"
#include "exchange/sending.hpp"

namespace heddle {

/// Ordinary memory of one rank for a round trip. An expert's block has room for ranks * cap rows.
struct LowLatencyScratch {
  Numbering sent;                   ///< numbers [tokens, topk]: of each pair among this sender's of its expert; totals [experts]
  std::int32_t* arrived = nullptr;  ///< [local experts (at least 1), ranks]: rows of each region
  // The masked layout that the experts read: rows of expert e at e * block_rows, packed in source order.
  int block_rows = 0;
  std::byte* rows = nullptr;       ///< [local experts, block_rows] in wire format
  PairOrigin* origins = nullptr;   ///< likewise
  float* weights = nullptr;        ///< likewise
  std::int32_t* counts = nullptr;  ///< [local experts] (masked_m)
  /// [experts]: the totals of `sent` once more, for who counts what was sent; null: for nobody.
  std::int32_t* sent_counts = nullptr;
};

/// Where a pair's row goes, if it does.
struct LowLatencyDestination {
  std::int32_t rank = -1;
  std::uint32_t number = 0;  ///< of the row there
  HEDDLE_HOST_DEVICE bool counts() const { return rank >= 0; }
};

template <Worker W>
HEDDLE_PROTOCOL bool low_latency_send(W& w, const LowLatencyLayout& layout, const SendInput& input, const PlacementView& placement,
                                      const LowLatencyScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const int topk = input.topk;
  const int pairs = input.tokens * topk;
  const int experts = layout.shape.experts;
  const int chunk = kinds_chunk(w, Crew::squad, pairs);
  Numbering sent = scratch.sent;
  const Crew crew = crew_for(w, pairs <= few_kinds, pairs, experts, (pairs + chunk - 1) / chunk, sent);
  const auto expert_of = [&](int pair) {
    const std::int32_t id = input.ids[pair];
    return id < experts ? id : -1;
  };
  if (!number_kinds(w, crew, pairs, experts, expert_of, sent)) return false;
  write_counts(w, layout, placement, sent.totals);
  if (scratch.sent_counts != nullptr && w.index() == 0) w.lanes(experts, [&](int e) { scratch.sent_counts[e] = sent.totals[e]; });
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto destination = [&](int choice) {
      const int pair = token * topk + choice;
      const int d = placement.rank_of_choice(input.ids[pair]);
      if (d < 0 || !w.live(d) || sent.numbers[pair] >= layout.shape.cap) return LowLatencyDestination{};
      const std::size_t number = layout.row_number(placement.local_index[input.ids[pair]], heap.rank, sent.numbers[pair]);
      return LowLatencyDestination{d, static_cast<std::uint32_t>(number)};
    };
    int n = topk;
    const auto destinations = those_that_count(w, n, destination);
    const auto row = [&](int i) {
      const LowLatencyDestination to = destinations(i);
      return to.counts() ? heap.at<std::byte>(to.rank, layout.row(to.number)) : nullptr;
    };
    const auto origin = [&](int choice) {
      const LowLatencyDestination to = destination(choice);
      return to.counts() ? heap.at<PairOrigin>(to.rank, layout.origin(to.number)) : nullptr;
    };
    send_row(w, n, row, input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden, layout.wire, part_of(item, bits));
    if (!part_of(item, bits).last()) continue;
    write_each(w, topk, origin, [&](int choice) {
      return PairOrigin{token * topk + choice, input.weights[token * topk + choice]};
    });
  }
  tell(
      w, [&](int peer) { return layout.arrived_word(peer); }, [](int) { return 1; });
  return true;
}

/// Waits for every live source, after which the rows are there, and takes their counts [local experts, ranks]; null on abort.
template <Worker W>
HEDDLE_PROTOCOL const std::int32_t* low_latency_hear(W& w, const LowLatencyLayout& layout, int local_experts,
                                                     const LowLatencyScratch& scratch) {
  if (!w.begin()) return nullptr;
  const HeapView heap = w.heap();
  if (!hear_all(
          w, [&](int peer) { return layout.arrived_word(peer); }, WordKind::low_latency_arrived))
    return nullptr;
  const auto count = [&](int region) {
    const int s = region % heap.ranks;
    return w.live(s) ? heap.template mine<const std::int32_t>(layout.count(region / heap.ranks, s)) : nullptr;
  };
  return take_values(w, local_experts * heap.ranks, count, scratch.arrived);
}

/// Packs each expert's rows in source order.
template <Worker W>
HEDDLE_PROTOCOL void low_latency_pack(W& w, const LowLatencyLayout& layout, int local_experts, const std::int32_t* arrived,
                                      const LowLatencyScratch& scratch) {
  const HeapView heap = w.heap();
  const int ranks = heap.ranks;
  const int rows = w.sum_values(local_experts * ranks, arrived);
  const int bits = w.part_bits(rows, layout.wire.hidden);
  const auto rows_of = [&](int region) { return arrived[region]; };
  w.deal(local_experts * ranks, ranks, bits, rows_of, [&](int region, int slot, int before, const RowPart& part) {
    const int e = region / ranks;
    const std::size_t from = layout.row_number(e, region % ranks, slot);
    const auto to = static_cast<std::size_t>(e * scratch.block_rows + before + slot);
    const auto place = [&](int) { return scratch.rows + to * layout.wire.row_bytes(); };
    copy_row(w, 1, place, heap.mine<std::byte>(layout.row(from)), layout.wire, part);
    if (!part.last()) return;
    const PairOrigin origin = w.read(heap.mine<PairOrigin>(layout.origin(from)));
    scratch.origins[to] = origin;
    scratch.weights[to] = origin.weight;
  });
  if (w.index() == 0) {
    w.lanes(local_experts, [&](int e) {
      int sum = 0;
      for (int s = 0; s < ranks; ++s) sum += arrived[e * ranks + s];
      scratch.counts[e] = sum;
    });
  }
  w.complete_all();
}

/// results [local experts, block_rows, H]: each row returns to the slot of its choice at its home.
template <Worker W>
HEDDLE_PROTOCOL bool low_latency_return(W& w, const LowLatencyLayout& layout, int local_experts, const bf16* results,
                                        const LowLatencyScratch& scratch) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const int ranks = heap.ranks;
  const int rows = w.sum_values(local_experts, scratch.counts);
  const int bits = w.part_bits(rows, layout.returned.hidden);
  const auto arrived = [&](int region) { return scratch.arrived[region]; };
  w.deal(local_experts * ranks, ranks, bits, arrived, [&](int region, int slot, int before, const RowPart& part) {
    const auto number = static_cast<std::size_t>(region / ranks * scratch.block_rows + before + slot);
    const auto pair = static_cast<std::size_t>(scratch.origins[number].pair);
    const auto to = [&](int) { return heap.at<std::byte>(region % ranks, layout.slot(pair)); };
    send_row(w, 1, to, results + number * static_cast<std::size_t>(layout.returned.hidden), layout.returned, part);
  });
  tell(
      w, [&](int peer) { return layout.returned_word(peer); }, [](int) { return 1; });
  return true;
}

/// out [tokens, H] = sum of a token's slots in choice order, choices without an expert or on a dead rank
/// left out; with `weighted` each is multiplied by its routing weight. `shared` is added last.
template <Worker W>
HEDDLE_PROTOCOL bool low_latency_collect(W& w, const LowLatencyLayout& layout, const SendInput& input,
                                         const PlacementView& placement, bool weighted, const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  if (!hear_all(
          w, [&](int peer) { return layout.returned_word(peer); }, WordKind::low_latency_returned))
    return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto choices = side_by_side(w, input.topk, [&](int choice) { return live_choice(w, input, placement, token, choice); });
    const auto term = [&](int choice) {
      const LiveChoice mine = choices(choice);
      if (mine.rank < 0) return SumTerm{};
      const auto pair = static_cast<std::size_t>(token) * static_cast<std::size_t>(input.topk) + static_cast<std::size_t>(choice);
      return SumTerm{heap.mine<std::byte>(layout.slot(pair)), mine.weight};
    };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, input.topk, term, SumFormat{layout.returned, weighted},
                  shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
