// gather for few tokens, whose rows travel with the flag beside the data (docs/protocols/gather.md): every word of a row holds
// four bytes of it and the call's tag, and whoever waits for a row waits for its words. So nothing has to have arrived before a
// word about it is sent off. The two rendezvous stay, but no row stands behind their words: they are spoken first, and heard
// beside the rows by one squad.
//
// Rows are sent from the first worker on and taken from the last one on, so that with few rows nobody does both.
#pragma once

#include "exchange/gather/protocol.hpp"
#include "formats/group.hpp"

namespace heddle {

/// Where the words of rows lie in every rank's part. Nothing but such words is ever written there, so nothing else looks like one.
struct GatherTagged {
  std::size_t dispatch = 0;  ///< [source][tokens] rows and their routing
  std::size_t combine = 0;   ///< [worker rank][tokens] partial sums
  int tokens = 0;            ///< most tokens of a rank that travel so; 0: none do

  /// Do the rows of a step travel so? The same on all ranks.
  HEDDLE_HOST_DEVICE bool takes(int max_tokens) const { return tokens > 0 && max_tokens <= tokens; }

  /// Words of a row; its routing, k ids and k weights, is behind it.
  HEDDLE_HOST_DEVICE static int row_words(const RowFormat& format) {
    return static_cast<int>(format.row_bytes() / tagged_bytes_a_word);
  }
  HEDDLE_HOST_DEVICE static std::size_t record_bytes(const GatherLayout& layout) {
    return sizeof(Word) * layout.record_bytes() / tagged_bytes_a_word;
  }
  HEDDLE_HOST_DEVICE static std::size_t result_bytes(const GatherLayout& layout) {
    return sizeof(Word) * layout.returned.row_bytes() / tagged_bytes_a_word;
  }
  HEDDLE_HOST_DEVICE std::size_t record(const GatherLayout& layout, int source, int token) const {
    return dispatch + static_cast<std::size_t>(source * tokens + token) * record_bytes(layout);
  }
  HEDDLE_HOST_DEVICE std::size_t result(const GatherLayout& layout, int worker, int token) const {
    return combine + static_cast<std::size_t>(worker * tokens + token) * result_bytes(layout);
  }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes(const GatherLayout& layout) const {
    return static_cast<std::size_t>(layout.shape.ranks * tokens) * record_bytes(layout);
  }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes(const GatherLayout& layout) const {
    return static_cast<std::size_t>(layout.shape.ranks * tokens) * result_bytes(layout);
  }
};

/// Tells every rank how many tokens come and sends them; the own ones go where gather hands rows over, in blocks of `block_rows`.
template <Worker W>
HEDDLE_PROTOCOL bool gather_send_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int block_rows,
                                        const SendInput& input) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  tell_at_once(
      w, [&](int peer) { return layout.arrived_word(peer); }, [&](int) { return input.tokens; }, w.count() - 1);
  const int row_words = GatherTagged::row_words(layout.wire);
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  const int parts = input.tokens << bits;
  for (int item = w.index(); item < parts + input.tokens; item += w.count()) {
    const bool is_row = item < parts;
    const int token = is_row ? row_of(item, bits) : item - parts;
    const std::size_t offset = tagged.record(layout, heap.rank, token);
    const auto to = [&](int d) {
      return d != heap.rank && w.live(d) ? heap.at<Word>(d, offset) + (is_row ? 0 : row_words) : nullptr;
    };
    if (is_row) {
      const bf16* row = input.hidden + static_cast<std::ptrdiff_t>(token) * layout.wire.hidden;
      const auto own = [&](int) {
        return heap.mine<std::byte>(layout.record(static_cast<std::size_t>(heap.rank * block_rows + token)));
      };
      w.send_tagged(heap.ranks, to, reinterpret_cast<const std::byte*>(row), row_words, part_of(item, bits));
      send_row(w, 1, own, row, layout.wire, part_of(item, bits));
    } else {
      const std::ptrdiff_t pair = static_cast<std::ptrdiff_t>(token) * input.topk;
      w.send_tagged_values(heap.ranks, to, 2 * input.topk, [&](int i) {
        return i < input.topk ? static_cast<std::uint32_t>(input.ids[pair + i]) : float_bits(input.weights[pair + i - input.topk]);
      });
    }
  }
  w.complete_all();
  return true;
}

/// One row's routing to ordinary memory, "no expert" where there is no row. The own rank's is where its tokens are.
template <Worker W, class Count>
HEDDLE_PROTOCOL bool gather_take_routing(W& w, const GatherLayout& layout, const TaggedRow& from, bool own, const SendInput& input,
                                         const PlacementView& placement, std::size_t row, const ArrivedRouting& routing,
                                         const Count& count) {
  const int k = routing.topk;
  std::int32_t* ids = routing.local_ids + row * static_cast<std::size_t>(k);
  float* weights = routing.weights + row * static_cast<std::size_t>(k);
  const int rank = w.heap().rank;
  Taken taken = Taken::none;
  if (own && from.number < input.tokens) {
    const std::ptrdiff_t pair = static_cast<std::ptrdiff_t>(from.number) * k;
    w.lanes(k, [&](int choice) {
      ids[choice] = placement.local_id(input.ids[pair + choice], rank);
      weights[choice] = input.weights[pair + choice];
      count(ids[choice]);
    });
    return true;
  }
  if (!own && from.words != nullptr) {
    taken = w.take_tagged_values(from, GatherTagged::row_words(layout.wire), 2 * k, [&](int i, std::uint32_t value) {
      if (i < k) {
        ids[i] = placement.local_id(static_cast<std::int32_t>(value), rank);
        count(ids[i]);
      } else {
        weights[i - k] = float_from_bits(value);
      }
    });
  }
  if (taken == Taken::none) {
    w.lanes(k, [&](int choice) {
      ids[choice] = -1;
      weights[choice] = 0;
    });
  }
  return taken != Taken::gave_up;
}

/// Waits for the rows of all ranks, in blocks of `block_rows`, and lays them where gather hands them over, with their routing in
/// ordinary memory. The first squad leaves everybody's tokens in counts [ranks]. False on abort.
template <Worker W, class Count = NotCounted>
HEDDLE_PROTOCOL bool gather_take_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int block_rows,
                                        const SendInput& input, const PlacementView& placement, std::int32_t* counts,
                                        const ArrivedRouting& routing, const Count& count = {}) {
  if (w.first_squad() && gather_hear(w, layout, counts) == nullptr) return false;
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const auto from = [&](int source, int token) {
    const WordName name{WordKind::gather_arrived, source, token};
    if (!w.live(source)) return TaggedRow{nullptr, nullptr, token, name};
    return TaggedRow{heap.mine<const Word>(tagged.record(layout, source, token)),
                     heap.mine<const Word>(layout.arrived_word(source)), token, name};
  };
  const int foreign = (heap.ranks - 1) * block_rows;
  const int bits = w.part_bits(foreign, layout.wire.hidden);
  const int parts = foreign << bits;
  for (int item = w.count() - 1 - w.index(); item < parts + heap.ranks * block_rows; item += w.count()) {
    const bool is_row = item < parts;
    const int place = is_row ? row_of(item, bits) : item - parts;
    const int other = place / block_rows;
    const int source = is_row && other >= heap.rank ? other + 1 : other;
    const int token = place % block_rows;
    const auto row = static_cast<std::size_t>(source * block_rows + token);
    const TaggedRow words = from(source, token);
    if (!is_row) {
      if (!gather_take_routing(w, layout, words, source == heap.rank, input, placement, row, routing, count)) return false;
    } else if (words.words != nullptr) {
      auto* to = heap.mine<std::byte>(layout.record(row));
      if (w.take_tagged(to, words, GatherTagged::row_words(layout.wire), part_of(item, bits)) == Taken::gave_up) return false;
    }
  }
  return true;
}

/// results [ranks * block_rows, H]: each partial sum of a token goes home at once, the own rank's last. tokens [ranks]: of every
/// rank.
template <Worker W>
HEDDLE_PROTOCOL bool gather_return_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int block_rows,
                                          const std::int32_t* tokens, const bf16* results) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  tell_at_once(
      w, [&](int peer) { return layout.partial_word(peer); }, [](int) { return 1; }, w.count() - 1);
  const int rows = heap.ranks * block_rows;
  const int bits = w.part_bits(rows, layout.returned.hidden);
  for (int item = w.index(); item < rows << bits; item += w.count()) {
    const int place = row_of(item, bits);
    const int home = (place / block_rows + heap.rank + 1) % heap.ranks;
    const int token = place % block_rows;
    if (!w.live(home) || token >= tokens[home]) continue;
    const auto to = [&](int) { return heap.at<Word>(home, tagged.result(layout, heap.rank, token)); };
    const bf16* from = results + static_cast<std::ptrdiff_t>(home * block_rows + token) * layout.returned.hidden;
    w.send_tagged(1, to, reinterpret_cast<const std::byte*>(from), GatherTagged::row_words(layout.returned), part_of(item, bits));
  }
  return true;
}

/// out [tokens, H] = sum over ranks, ascending, of the partial sums that come home; as gather_pull's.
template <Worker W>
HEDDLE_PROTOCOL bool gather_collect_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int tokens,
                                           const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  // Nothing stands behind these words; but no rank goes on to the next call before all have come to this combine.
  const auto word = [&](int peer) { return layout.partial_word(peer); };
  if (w.first_squad() && !hear_all(w, word, WordKind::gather_partial)) return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(tokens, layout.returned.hidden);
  for (int item = w.count() - 1 - w.index(); item < tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto term = [&](int d) {
      const WordName name{WordKind::gather_partial, d, token};
      return TaggedRow{w.live(d) ? heap.mine<const Word>(tagged.result(layout, d, token)) : nullptr, nullptr, token, name};
    };
    if (!w.reduce_tagged(out + static_cast<std::size_t>(token) * hidden, heap.ranks, term, SumFormat{layout.returned, false},
                         shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits)))
      return false;
  }
  return true;
}

}  // namespace heddle
