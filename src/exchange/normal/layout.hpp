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
  int flows = 1;         ///< parts of a queue that workers fill and empty side by side, at most queue_rows and most_squads
  Areas areas;

  HEDDLE_HOST_DEVICE std::size_t word(int row, int peer) const { return word_at(areas, shape.ranks, row, peer); }
  // At the receiver: what a source will send, and has sent. At the sender: what a receiver has taken.
  HEDDLE_HOST_DEVICE std::size_t count_word(int source) const { return word(dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t tail_word(int source) const { return word(dispatch_words + 1, source); }
  HEDDLE_HOST_DEVICE std::size_t head_word(int receiver) const { return word(dispatch_words + 2, receiver); }
  HEDDLE_HOST_DEVICE std::size_t return_tail_word(int worker) const { return word(combine_words, worker); }
  HEDDLE_HOST_DEVICE std::size_t return_head_word(int home) const { return word(combine_words + 1, home); }

  /// Rows that one flow holds.
  HEDDLE_HOST_DEVICE int flow_rows() const { return queue_rows / flows; }
  /// Row `number` goes by flow number mod flows; a flow's rows follow each other in its part of the queue.
  HEDDLE_HOST_DEVICE std::size_t queue_row(int peer, std::uint32_t number) const {
    const std::uint32_t flow = number % static_cast<std::uint32_t>(flows);
    const std::uint32_t turn = number / static_cast<std::uint32_t>(flows);
    const auto within = flow * static_cast<std::uint32_t>(flow_rows()) + turn % static_cast<std::uint32_t>(flow_rows());
    return static_cast<std::size_t>(peer) * static_cast<std::size_t>(queue_rows) + within;
  }
  HEDDLE_HOST_DEVICE std::size_t queue_capacity() const {
    return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(queue_rows);
  }
  HEDDLE_HOST_DEVICE std::size_t record_bytes() const { return wire.row_bytes() + routing_bytes(shape.topk); }
  /// Dispatch area: [source][queue_rows] records.
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
