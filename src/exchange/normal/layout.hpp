// normal: exact sizes, rows through bounded queues in the receiver's memory (exchange-ways article,
// section 3.2). A record is a wire row with its routing behind it.
#pragma once

#include "exchange/areas.hpp"
#include "formats/row_format.hpp"

namespace heddle {

struct NormalLayout {
  ExchangeShape shape;
  RowFormat wire;
  RowFormat returned;
  int queue_rows = 256;  ///< rows a queue holds; one queue a pair of ranks and direction
  int chunk_rows = 32;   ///< rows a tail is published for
  Areas areas;

  HEDDLE_HOST_DEVICE std::size_t word(int row, int peer) const { return word_at(areas, shape.ranks, row, peer); }
  // At the receiver: what a source will send, and has sent. At the sender: what a receiver has taken.
  HEDDLE_HOST_DEVICE std::size_t count_word(int source) const { return word(dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t tail_word(int source) const { return word(dispatch_words + 1, source); }
  HEDDLE_HOST_DEVICE std::size_t head_word(int receiver) const { return word(dispatch_words + 2, receiver); }
  HEDDLE_HOST_DEVICE std::size_t return_tail_word(int worker) const { return word(combine_words, worker); }
  HEDDLE_HOST_DEVICE std::size_t return_head_word(int home) const { return word(combine_words + 1, home); }

  HEDDLE_HOST_DEVICE std::size_t queue_row(int peer, std::uint32_t number) const {
    return static_cast<std::size_t>(peer) * static_cast<std::size_t>(queue_rows) + number % static_cast<std::uint32_t>(queue_rows);
  }
  HEDDLE_HOST_DEVICE std::size_t queue_capacity() const {
    return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(queue_rows);
  }
  HEDDLE_HOST_DEVICE std::size_t record_bytes() const { return wire.row_bytes() + routing_bytes(shape.topk); }
  /// Dispatch area: [source][queue_rows] records. Row `number` of a source is at number mod queue_rows.
  HEDDLE_HOST_DEVICE std::size_t record(int source, std::uint32_t number) const {
    return areas.dispatch + queue_row(source, number) * record_bytes();
  }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes() const { return queue_capacity() * record_bytes(); }
  /// Combine area: [worker rank][queue_rows] returned rows.
  HEDDLE_HOST_DEVICE std::size_t result(int worker, std::uint32_t number) const {
    return areas.combine + queue_row(worker, number) * returned.row_bytes();
  }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes() const { return queue_capacity() * returned.row_bytes(); }
};

}  // namespace heddle
