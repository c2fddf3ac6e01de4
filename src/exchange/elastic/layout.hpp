// elastic: one copy a rank, straight into a region a source; a second stage lays rows out by expert
// (exchange-ways article, section 5). Results return as one row a rank, or one a choice.
#pragma once

#include "exchange/areas.hpp"
#include "formats/row_format.hpp"
#include "heddle/exchange.hpp"

namespace heddle {

struct ElasticLayout {
  ExchangeShape shape;
  RowFormat wire;
  RowFormat returned;
  Reduce reduce = Reduce::rank;
  Areas areas;

  // Words: [source] counts; [worker rank] return flags.
  HEDDLE_HOST_DEVICE std::size_t count_word(int source) const { return word_at(areas, shape.ranks, dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t returned_word(int worker) const { return word_at(areas, shape.ranks, combine_words, worker); }

  // Dispatch area: rows, routing, home tokens; each [source][cap].
  HEDDLE_HOST_DEVICE std::size_t region_rows() const {
    return static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.cap);
  }
  HEDDLE_HOST_DEVICE std::size_t row_number(int source, int slot) const {
    return static_cast<std::size_t>(source) * static_cast<std::size_t>(shape.cap) + static_cast<std::size_t>(slot);
  }
  HEDDLE_HOST_DEVICE std::size_t row(std::size_t number) const { return areas.dispatch + number * wire.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t routing(std::size_t number) const {
    return row(region_rows()) + number * routing_bytes(shape.topk);
  }
  HEDDLE_HOST_DEVICE std::size_t home_token(std::size_t number) const {
    return routing(region_rows()) + number * sizeof(std::int32_t);
  }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes() const {
    return region_rows() * (wire.row_bytes() + routing_bytes(shape.topk) + sizeof(std::int32_t));
  }

  // Combine area at the home rank: [worker rank][cap] summed rows, or [token][choice] slots.
  HEDDLE_HOST_DEVICE std::size_t summed_row(int worker, int slot) const {
    return areas.combine + row_number(worker, slot) * returned.row_bytes();
  }
  HEDDLE_HOST_DEVICE std::size_t slot(std::size_t pair) const { return areas.combine + pair * returned.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes() const {
    const auto rows_a_token = static_cast<std::size_t>(reduce == Reduce::rank ? shape.ranks : shape.topk);
    return rows_a_token * static_cast<std::size_t>(shape.cap) * returned.row_bytes();
  }
};

}  // namespace heddle
