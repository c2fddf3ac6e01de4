// one_sided: a block a source in every rank's part, each row with its ids and weights beside it
// (exchange-ways article, section 6.1). A block has room for the step's largest batch.
#pragma once

#include "exchange/areas.hpp"
#include "formats/row_format.hpp"

namespace heddle {

struct OneSidedLayout {
  /// Beside the row, its ids and its weights: six payloads in all.
  static constexpr int max_extra_payloads = 3;

  ExchangeShape shape;
  RowFormat wire;
  RowFormat returned;
  Areas areas;
  int extra_payloads = 0;
  std::size_t extra_bytes[max_extra_payloads] = {};  ///< a row, multiples of 16

  // Words: [source] arrivals; [worker rank] ready flags.
  HEDDLE_HOST_DEVICE std::size_t arrived_word(int source) const { return word_at(areas, shape.ranks, dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t ready_word(int worker) const { return word_at(areas, shape.ranks, combine_words, worker); }

  // Dispatch area: rows, routing, extra payloads; each [source][block_rows] with block_rows <= cap.
  HEDDLE_HOST_DEVICE std::size_t blocks() const {
    return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.cap);
  }
  HEDDLE_HOST_DEVICE static std::size_t row_number(int source, int block_rows, int slot) {
    return static_cast<std::size_t>(source) * static_cast<std::size_t>(block_rows) + static_cast<std::size_t>(slot);
  }
  HEDDLE_HOST_DEVICE std::size_t rows() const { return areas.dispatch; }
  HEDDLE_HOST_DEVICE std::size_t row(std::size_t number) const { return rows() + number * wire.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t routing(std::size_t number) const { return row(blocks()) + number * routing_bytes(shape.topk); }
  HEDDLE_HOST_DEVICE std::size_t extra(int payload, std::size_t number) const {
    std::size_t begin = routing(blocks());
    for (int p = 0; p < payload; ++p) begin += blocks() * extra_bytes[p];
    return begin + number * extra_bytes[payload];
  }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes() const {
    std::size_t bytes = blocks() * (wire.row_bytes() + routing_bytes(shape.topk));
    for (int p = 0; p < extra_payloads; ++p) bytes += blocks() * extra_bytes[p];
    return bytes;
  }

  // Combine area: this rank's partial sums, pulled by the home ranks.
  HEDDLE_HOST_DEVICE std::size_t result(std::size_t number) const { return areas.combine + number * returned.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes() const { return blocks() * returned.row_bytes(); }
};

}  // namespace heddle
