// All-gather of output rows: how every way ends under tensor-parallel attention, where each rank keeps
// its slice of the batch and all ranks want all outputs (exchange-ways article, section 1.2).
#pragma once

#include "exchange/areas.hpp"
#include "exchange/sending.hpp"

namespace heddle {

struct AllGatherLayout {
  ExchangeShape shape;
  int hidden = 0;
  Areas areas;

  HEDDLE_HOST_DEVICE std::size_t arrived_word(int source) const { return word_at(areas, shape.ranks, all_gather_words, source); }
  HEDDLE_HOST_DEVICE std::size_t row_bytes() const { return static_cast<std::size_t>(hidden) * sizeof(bf16); }
  HEDDLE_HOST_DEVICE std::size_t row(std::size_t number) const { return areas.outputs + number * row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t output_bytes() const {
    return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.cap) * row_bytes();
  }
};

/// mine [rows, H] goes to rows [first, first + rows) of every rank's out [all, H].
template <Worker W>
HEDDLE_PROTOCOL bool all_gather_rows(W& w, const AllGatherLayout& layout, std::size_t first, std::size_t rows, std::size_t all,
                                     const bf16* mine, bf16* out) {
  if (!w.begin()) return false;
  const HeapView& heap = w.heap();
  const RowFormat format{Wire::bf16, layout.hidden, {}, 1.0f};
  const auto hidden = static_cast<std::size_t>(layout.hidden);
  const auto stride = static_cast<std::size_t>(w.count());
  for (auto row = static_cast<std::size_t>(w.index()); row < rows; row += stride) {
    for (int d = 0; d < heap.ranks; ++d) {
      if (w.live(d))
        w.copy_row(heap.at<std::byte>(d, layout.row(first + row)), reinterpret_cast<const std::byte*>(mine + row * hidden), format);
    }
  }
  w.complete_all();
  if (!w.team_barrier()) return false;
  const auto word = [&](int peer) { return layout.arrived_word(peer); };
  tell_all(w, word, static_cast<std::uint32_t>(rows));
  if (!hear_all(w, word, WordKind::all_gather_arrived)) return false;
  for (auto row = static_cast<std::size_t>(w.index()); row < all; row += stride) {
    w.copy_bytes(out + row * hidden, heap.mine<std::byte>(layout.row(row)), layout.row_bytes());
  }
  w.complete_all();
  return w.team_barrier();
}

}  // namespace heddle
