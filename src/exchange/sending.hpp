// What every way's sending side shares: the input of one rank, where experts live, which ranks a token
// goes to and the number of each row among the sender's own (exact placement: never from a race).
#pragma once

#include <cstdint>

#include "exchange/areas.hpp"
#include "signal/worker.hpp"

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

/// slots[token * ranks + d] = the number of earlier tokens of this sender that go to rank d, or -1 if
/// the token does not go there; counts[d] = how many go. Dead ranks get none. One worker a
/// destination; a team_barrier must follow.
template <Worker W>
HEDDLE_PROTOCOL void number_rows_by_rank(W& w, const SendInput& input, const PlacementView& placement, std::int32_t* slots,
                                         std::int32_t* counts) {
  const int ranks = w.heap().ranks;
  for (int d = w.index(); d < ranks; d += w.count()) {
    w.lanes(input.tokens, [&](int token) { slots[token * ranks + d] = -1; });
    counts[d] = !w.live(d) ? 0
                           : w.enumerate(
                                 input.tokens, [&](int token) { return goes_to(input, placement, token, d); },
                                 [&](int token, int number) { slots[token * ranks + d] = number; });
  }
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

}  // namespace heddle
