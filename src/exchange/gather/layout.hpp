// gather: every rank gets every token (exchange-ways article, section 2). A record is a wire row with
// its routing behind it, so that one copy moves both and an all-reduce can sum both.
#pragma once

#include "exchange/areas.hpp"
#include "formats/row_format.hpp"

namespace heddle {

struct GatherLayout {
  ExchangeShape shape;
  RowFormat wire;
  RowFormat returned;
  Areas areas;

  HEDDLE_HOST_DEVICE std::size_t word(int row, int peer) const { return word_at(areas, shape.ranks, row, peer); }
  HEDDLE_HOST_DEVICE std::size_t count_word(int source) const { return word(dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t arrived_word(int source) const { return word(dispatch_words + 1, source); }
  HEDDLE_HOST_DEVICE std::size_t reduced_word(int source) const { return word(dispatch_words + 2, source); }
  HEDDLE_HOST_DEVICE std::size_t partial_word(int worker) const { return word(combine_words, worker); }

  HEDDLE_HOST_DEVICE std::size_t all_rows() const {
    return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.cap);
  }
  HEDDLE_HOST_DEVICE std::size_t record_bytes() const { return wire.row_bytes() + routing_bytes(shape.topk); }

  // Dispatch area: the gathered records, then this rank's zero-filled buffer (all-reduce only).
  HEDDLE_HOST_DEVICE std::size_t record(std::size_t row) const { return areas.dispatch + row * record_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t own_record(std::size_t row) const { return record(all_rows() + row); }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes() const { return 2 * all_rows() * record_bytes(); }

  // Combine area: this rank's partial sums of all rows.
  HEDDLE_HOST_DEVICE std::size_t partial(std::size_t row) const { return areas.combine + row * returned.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes() const { return all_rows() * returned.row_bytes(); }
};

}  // namespace heddle
