// What every way's sending side shares: the input of one rank, where experts live, which ranks a token
// goes to and the number of each row among the sender's own (exact placement: never from a race).
#pragma once

#include <cstdint>

#include "exchange/areas.hpp"
#include "exchange/numbering.hpp"
#include "heddle/routing.hpp"
#include "signal/bulk.hpp"

namespace heddle {

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
  int experts = 0;

  /// The rank of a choice; -1 for none. On GPUs ids are checked while others already look at them.
  HEDDLE_HOST_DEVICE int rank_of_choice(std::int32_t id) const {
    const bool some = id >= 0 && id < experts;
    const int rank = rank_of[some ? id : 0];
    return some ? rank : -1;
  }
  /// A choice as `rank` sees it: its local expert, or -1.
  HEDDLE_HOST_DEVICE std::int32_t local_id(std::int32_t id, int rank) const {
    const bool some = id >= 0 && id < experts;
    const int there = some ? id : 0;
    const int home = rank_of[there];
    const std::int32_t local = local_index[there];  // not behind the branch, so that both loads are on their way together
    return some && (home == rank || home == every_rank) ? local : -1;
  }
};

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

/// A rendezvous: every rank tells all live ranks by a word each, then hears from all of them. word_of(peer) is the offset
/// of the words that `peer` writes. tell() ends a sending half, value(peer) is what the peer is told.
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void tell(W& w, WordOf word_of, Value value) {
  const HeapView heap = w.heap();
  const auto word = [&](int d) { return w.live(d) ? heap.template at<Word>(d, word_of(heap.rank)) : nullptr; };
  announce(w, heap.ranks, word, value);
}
/// The same by one worker of the rank, the last one that comes here.
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void tell_together(W& w, WordOf word_of, Value value) {
  const HeapView heap = w.heap();
  const auto word = [&](int d) { return w.live(d) ? heap.template at<Word>(d, word_of(heap.rank)) : nullptr; };
  announce_together(w, heap.ranks, word, value);
}
/// The same where there is nothing to do before: nobody is waited for, and one worker speaks.
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void tell_at_once(W& w, WordOf word_of, Value value, int speaker = 0) {
  const HeapView heap = w.heap();
  const auto word = [&](int d) { return w.live(d) ? heap.template at<Word>(d, word_of(heap.rank)) : nullptr; };
  if (w.index() == speaker) announce_alone(w, heap.ranks, word, value);
}
/// What every rank told, 0 where it is not live, for this worker's squad; the first squad leaves it in `values`
/// [ranks]. Null on abort.
template <Worker W, class WordOf>
HEDDLE_PROTOCOL const std::int32_t* hear(W& w, WordOf word_of, WordKind kind, std::int32_t* values) {
  const HeapView heap = w.heap();
  const auto word = [&](int s) { return w.live(s) ? heap.template mine<const Word>(word_of(s)) : nullptr; };
  const std::int32_t* seen = nullptr;
  const bool heard = hear_each(
      w, heap.ranks, word,
      [&](int s) {
        return WordName{kind, s, -1};
      },
      values, &seen);
  return heard ? seen : nullptr;
}
/// The same where only that they told something matters.
template <Worker W, class WordOf>
HEDDLE_PROTOCOL bool hear_all(W& w, WordOf word_of, WordKind kind) {
  const HeapView heap = w.heap();
  const auto word = [&](int s) { return w.live(s) ? heap.template mine<const Word>(word_of(s)) : nullptr; };
  return hear_each(
      w, heap.ranks, word,
      [&](int s) {
        return WordName{kind, s, -1};
      },
      nullptr, nullptr);
}
/// Where a rank's tokens go, readable by this worker's squad.
struct RankNumbers {
  const std::int32_t* slots = nullptr;   ///< [tokens, ranks]: number among the sender's rows to that rank, -1: does not go there
  const std::int32_t* counts = nullptr;  ///< [ranks]: rows to each rank
};

/// The ranks [32 word, 32 word + 32) that a token has experts on, a bit each. Four choices are looked up together.
HEDDLE_HOST_DEVICE inline std::uint32_t ranks_of_token(const PlacementView& placement, const std::int32_t* ids, int topk,
                                                       int word) {
  constexpr int ahead = 4;
  std::uint32_t found = 0;
  for (int first = 0; first < topk; first += ahead) {
    std::int32_t some[ahead];
    int ranks[ahead];
    for (int j = 0; j < ahead; ++j) some[j] = first + j < topk ? ids[first + j] : -1;
    for (int j = 0; j < ahead; ++j) ranks[j] = placement.rank_of_choice(some[j]);
    for (int j = 0; j < ahead; ++j) {
      const int bit = ranks[j] - 32 * word;
      found |= bit >= 0 && bit < 32 ? 1u << bit : 0u;
    }
  }
  return found;
}

/// The live ones of ranks [32 word, 32 word + 32), a bit each.
template <Worker W>
HEDDLE_PROTOCOL std::uint32_t live_bits(const W& w, int word) {
  if (w.all_live()) return ~0u;
  std::uint32_t bits = 0;
  for (int rank = 32 * word; rank < w.heap().ranks && rank < 32 * word + 32; ++rank) bits |= w.live(rank) ? 1u << (rank % 32) : 0u;
  return bits;
}

/// Tells the ranks of all experts how many rows this one has for each, 0 included, where layout.count(local expert, source) says.
/// By the one worker that knows them.
template <Worker W, class Layout>
HEDDLE_PROTOCOL void write_counts_alone(W& w, const Layout& layout, const PlacementView& placement, const std::int32_t* sent) {
  const HeapView heap = w.heap();
  const auto count = [&](int e) {
    const int d = placement.rank_of[e];
    return w.live(d) ? heap.at<std::int32_t>(d, layout.count(placement.local_index[e], heap.rank)) : nullptr;
  };
  write_each(w, layout.shape.experts, count, [&](int e) { return sent[e]; });
}
/// Where all workers do, one of them.
template <Worker W, class Layout>
HEDDLE_PROTOCOL void write_counts(W& w, const Layout& layout, const PlacementView& placement, const std::int32_t* sent) {
  if (w.first_squad() && w.squad_index() == 0) write_counts_alone(w, layout, placement, sent);
}

/// Where a choice went, -1 if it has no expert or its rank is dead, and its weight.
struct LiveChoice {
  std::int32_t rank = -1;
  float weight = 0;
};
template <Worker W>
HEDDLE_PROTOCOL LiveChoice live_choice(const W& w, const SendInput& input, const PlacementView& placement, int token, int choice) {
  const std::ptrdiff_t pair = static_cast<std::ptrdiff_t>(token) * input.topk + choice;
  const int rank = placement.rank_of_choice(input.ids[pair]);
  return {rank >= 0 && w.live(rank) ? rank : -1, input.weights[pair]};
}

/// Numbers the rows to every rank; dead ranks get none. `ordinary` is where later halves find the slots: numbers
/// [tokens, ranks], totals [ranks], before [chunks of tokens, ranks]. Ends with a barrier.
template <Worker W>
HEDDLE_PROTOCOL bool number_rows_by_rank(W& w, const SendInput& input, const PlacementView& placement, const Numbering& ordinary,
                                         RankNumbers& rows) {
  const int ranks = w.heap().ranks;
  const int chunk = w.chunk(set_chunk, input.tokens);
  Numbering to = ordinary;
  const Crew crew = crew_for(w, input.tokens <= few_sets, input.tokens * ranks, ranks, (input.tokens + chunk - 1) / chunk, to);
  const auto bits = [&](int token, int word) {
    return ranks_of_token(placement, input.ids + static_cast<std::ptrdiff_t>(token) * input.topk, input.topk, word) &
           live_bits(w, word);
  };
  if (!number_sets(w, crew, input.tokens, ranks, bits, to)) return false;
  rows = {to.numbers, to.totals};
  if (crew == Crew::squad && w.first_squad()) {
    for (int part = w.squad_index(); part * 32 < input.tokens * ranks; part += w.squad_count()) {
      const int first = part * 32;
      const int items = input.tokens * ranks - first < 32 ? input.tokens * ranks - first : 32;
      w.lanes(items, [&](int i) { ordinary.numbers[first + i] = to.numbers[first + i]; });
    }
    if (w.squad_index() == 0) w.lanes(ranks, [&](int d) { ordinary.totals[d] = to.totals[d]; });
  }
  return true;
}

/// A token's routing, its k ids and then its k weights (routing_bytes of room), to each place that is not null.
template <Worker W, class To>
HEDDLE_PROTOCOL void send_routing(W& w, int n, To to, const SendInput& input, int token) {
  const auto ids = [&](int i) { return reinterpret_cast<std::int32_t*>(to(i)); };
  const auto weights = [&](int i) {
    std::byte* place = to(i);
    return place == nullptr ? nullptr : reinterpret_cast<float*>(place) + input.topk;
  };
  send_values(w, n, ids, input.ids + token * input.topk, input.topk);
  send_values(w, n, weights, input.weights + token * input.topk, input.topk);
}

}  // namespace heddle
