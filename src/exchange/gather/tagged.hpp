// gather for few tokens, whose rows travel with the flag beside the data (docs/protocols/gather.md): every word of a row holds
// four bytes of it and the call's tag, and whoever waits for a row waits for its words. So no row has to arrive before a word
// about it is sent off. The two rendezvous stay, but nothing is behind their words: they are spoken at once.
#pragma once

#include "exchange/gather/protocol.hpp"

namespace heddle {

/// Where the words of rows lie in every rank's part. Nothing but such words is ever written there, so nothing else looks like one.
struct GatherTagged {
  std::size_t dispatch = 0;  ///< [source][tokens] rows and their routing
  std::size_t combine = 0;   ///< [worker rank][tokens] partial sums
  int tokens = 0;            ///< most tokens of a rank that travel so

  static constexpr std::size_t bytes_a_word = 4;

  /// Words of a row, and of its routing behind it.
  HEDDLE_HOST_DEVICE static int row_words(const GatherLayout& layout) {
    return static_cast<int>(layout.wire.row_bytes() / bytes_a_word);
  }
  HEDDLE_HOST_DEVICE static std::size_t record_bytes(const GatherLayout& layout) {
    return sizeof(Word) * layout.record_bytes() / bytes_a_word;
  }
  HEDDLE_HOST_DEVICE static std::size_t result_bytes(const GatherLayout& layout) {
    return sizeof(Word) * layout.returned.row_bytes() / bytes_a_word;
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

/// Tells every rank how many tokens come, and sends them.
template <Worker W>
HEDDLE_PROTOCOL bool gather_send_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, const SendInput& input) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  tell_at_once(
      w, [&](int peer) { return layout.arrived_word(peer); }, [&](int) { return input.tokens; });
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const std::size_t offset = tagged.record(layout, heap.rank, token);
    const auto at = [&](int d, int first) { return w.live(d) ? heap.at<Word>(d, offset) + first : nullptr; };
    const auto* row = reinterpret_cast<const std::byte*>(input.hidden + static_cast<std::size_t>(token) * layout.wire.hidden);
    const int words = GatherTagged::row_words(layout);
    w.send_tagged(heap.ranks, [&](int d) { return at(d, 0); }, row, words, part_of(item, bits));
    if (!part_of(item, bits).last()) continue;
    const auto* ids = reinterpret_cast<const std::byte*>(input.ids + token * input.topk);
    const auto* weights = reinterpret_cast<const std::byte*>(input.weights + token * input.topk);
    w.send_tagged(heap.ranks, [&](int d) { return at(d, words); }, ids, input.topk, {});
    w.send_tagged(heap.ranks, [&](int d) { return at(d, words + input.topk); }, weights, input.topk, {});
  }
  return true;
}

/// Waits for the rows of all ranks, whose batches fill blocks of `block_rows`, and lays them where gather hands them over, with
/// their routing in ordinary memory. heard [ranks]: what gather_hear heard. False on abort, for all lanes of a warp alike.
template <Worker W>
HEDDLE_PROTOCOL bool gather_take_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int block_rows,
                                        const std::int32_t* heard, const PlacementView& placement, const ArrivedRouting& routing) {
  const HeapView heap = w.heap();
  const int rows = heap.ranks * block_rows;
  const int words = GatherTagged::row_words(layout);
  const auto name = [](int source, int token) { return WordName{WordKind::gather_arrived, source, token}; };
  const int bits = w.part_bits(rows, layout.wire.hidden);
  for (int item = w.index(); item < rows << bits; item += w.count()) {
    const int row = row_of(item, bits);
    const int source = row / block_rows;
    const int token = row % block_rows;
    if (token >= heard[source]) continue;
    const Word* from = heap.mine<const Word>(tagged.record(layout, source, token));
    auto* to = heap.mine<std::byte>(layout.record(static_cast<std::size_t>(row)));
    if (!w.take_tagged(to, from, words, part_of(item, bits), name(source, token))) return false;
  }
  bool fine = true;
  w.spread(rows, routing.topk, [&](int row, int choice) {
    const int source = row / block_rows;
    const int token = row % block_rows;
    std::uint32_t id = ~0u;
    std::uint32_t weight = 0;
    if (token < heard[source]) {
      const Word* from = heap.mine<const Word>(tagged.record(layout, source, token)) + words + choice;
      fine &= w.take_word(from, name(source, token), id) && w.take_word(from + routing.topk, name(source, token), weight);
    }
    const int pair = row * routing.topk + choice;
    routing.local_ids[pair] = placement.local_id(static_cast<std::int32_t>(id), heap.rank);
    routing.weights[pair] = float_from_bits(weight);
  });
  return w.all_of(fine);
}

/// results [ranks * block_rows, H]: each partial sum goes home at once. tokens [ranks]: of every rank.
template <Worker W>
HEDDLE_PROTOCOL bool gather_return_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int block_rows,
                                          const std::int32_t* tokens, const bf16* results) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  tell_at_once(
      w, [&](int peer) { return layout.partial_word(peer); }, [](int) { return 1; });
  const int rows = heap.ranks * block_rows;
  const int bits = w.part_bits(rows, layout.returned.hidden);
  for (int item = w.index(); item < rows << bits; item += w.count()) {
    const int row = row_of(item, bits);
    const int home = row / block_rows;
    const int token = row % block_rows;
    if (!w.live(home) || token >= tokens[home]) continue;
    const auto to = [&](int) { return heap.at<Word>(home, tagged.result(layout, heap.rank, token)); };
    const bf16* from = results + static_cast<std::size_t>(row) * static_cast<std::size_t>(layout.returned.hidden);
    w.send_tagged(1, to, reinterpret_cast<const std::byte*>(from), static_cast<int>(layout.returned.row_bytes() / 4),
                  part_of(item, bits));
  }
  return true;
}

/// out [tokens, H] as gather_pull's. rows [tokens, ranks, H]: ordinary memory for what arrives.
template <Worker W>
HEDDLE_PROTOCOL bool gather_collect_tagged(W& w, const GatherLayout& layout, const GatherTagged& tagged, int tokens, bf16* rows,
                                           const SharedRows& shared, bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  // Nothing is behind these words; but no rank goes on to the next call before all have come to this combine.
  if (!hear_all(
          w, [&](int peer) { return layout.partial_word(peer); }, WordKind::gather_partial))
    return false;
  const auto hidden = static_cast<std::size_t>(layout.returned.hidden);
  const int bits = w.part_bits(tokens, layout.returned.hidden);
  for (int item = w.index(); item < tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto row_of_rank = [&](int d) {
      return reinterpret_cast<std::byte*>(rows + static_cast<std::size_t>(token * heap.ranks + d) * hidden);
    };
    for (int d = 0; d < heap.ranks; ++d) {
      if (!w.live(d)) continue;
      const Word* from = heap.mine<const Word>(tagged.result(layout, d, token));
      const WordName name{WordKind::gather_partial, d, token};
      if (!w.take_tagged(row_of_rank(d), from, static_cast<int>(layout.returned.row_bytes() / 4), part_of(item, bits), name))
        return false;
    }
    const auto term = [&](int d) { return w.live(d) ? SumTerm{row_of_rank(d)} : SumTerm{}; };
    w.reduce_rows(out + static_cast<std::size_t>(token) * hidden, heap.ranks, term, SumFormat{layout.returned, false},
                  shared.of(static_cast<std::size_t>(token), hidden), part_of(item, bits));
  }
  return true;
}

}  // namespace heddle
