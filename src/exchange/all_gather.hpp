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
HEDDLE_PROTOCOL bool all_gather_rows(W& w, const AllGatherLayout& layout, int first, int rows, int all, const bf16* mine,
                                     bf16* out) {
  if (!w.begin()) return false;
  const HeapView heap = w.heap();
  const RowFormat format{Wire::bf16, layout.hidden, {}, 1.0f};
  const auto hidden = static_cast<std::size_t>(layout.hidden);
  const int bits = w.part_bits(rows, layout.hidden);
  for (int item = w.index(); item < rows << bits; item += w.count()) {
    const int row = row_of(item, bits);
    const auto to = [&](int d) {
      return w.live(d) ? heap.at<std::byte>(d, layout.row(static_cast<std::size_t>(first + row))) : nullptr;
    };
    send_row(w, heap.ranks, to, mine + static_cast<std::size_t>(row) * hidden, format, part_of(item, bits));
  }
  const auto word = [&](int peer) { return layout.arrived_word(peer); };
  tell(w, word, [&](int) { return rows; });
  if (!hear_all(w, word, WordKind::all_gather_arrived)) return false;
  const int out_bits = w.part_bits(all, layout.hidden);
  for (int item = w.index(); item < all << out_bits; item += w.count()) {
    const auto row = static_cast<std::size_t>(row_of(item, out_bits));
    const auto to = [&](int) { return reinterpret_cast<std::byte*>(out + row * hidden); };
    copy_row(w, 1, to, heap.mine<std::byte>(layout.row(row)), format, part_of(item, out_bits));
  }
  w.complete_all();
  return true;
}

}  // namespace heddle
