// low_latency: a region for every local expert and source, each with room for a whole cap, so nobody
// asks where to write (exchange-ways article, section 4.1). Results return into slots, one a choice.
#pragma once

#include "exchange/areas.hpp"
#include "formats/row_format.hpp"

namespace heddle {

/// What travels beside a row: whose choice it is, and its weight.
struct PairOrigin {
  std::int32_t pair = -1;  ///< token * topk + choice at its home
  float weight = 0;
};

struct LowLatencyLayout {
  ExchangeShape shape;
  RowFormat wire;
  RowFormat returned;
  Areas areas;

  // Words: [source] arrivals; [worker rank] return flags.
  HEDDLE_HOST_DEVICE std::size_t arrived_word(int source) const { return word_at(areas, shape.ranks, dispatch_words, source); }
  HEDDLE_HOST_DEVICE std::size_t returned_word(int worker) const { return word_at(areas, shape.ranks, combine_words, worker); }

  // Dispatch area: rows, then origins, each [local expert][source][cap]; then counts [local expert][source].
  HEDDLE_HOST_DEVICE std::size_t regions() const {
    return static_cast<std::size_t>(shape.max_local_experts) * static_cast<std::size_t>(shape.ranks) *
           static_cast<std::size_t>(shape.cap);
  }
  HEDDLE_HOST_DEVICE std::size_t row_number(int local_expert, int source, int slot) const {
    return (static_cast<std::size_t>(local_expert) * static_cast<std::size_t>(shape.ranks) + static_cast<std::size_t>(source)) *
               static_cast<std::size_t>(shape.cap) +
           static_cast<std::size_t>(slot);
  }
  HEDDLE_HOST_DEVICE std::size_t row(std::size_t number) const { return areas.dispatch + number * wire.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t origin(std::size_t number) const { return row(regions()) + number * sizeof(PairOrigin); }
  HEDDLE_HOST_DEVICE std::size_t count(int local_expert, int source) const {
    return origin(regions()) +
           sizeof(std::int32_t) *
               (static_cast<std::size_t>(local_expert) * static_cast<std::size_t>(shape.ranks) + static_cast<std::size_t>(source));
  }
  HEDDLE_HOST_DEVICE std::size_t dispatch_bytes() const { return count(shape.max_local_experts, 0) - areas.dispatch; }

  // Combine area: slots [token][choice] of this rank's own tokens.
  HEDDLE_HOST_DEVICE std::size_t slot(std::size_t pair) const { return areas.combine + pair * returned.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t combine_bytes() const {
    return static_cast<std::size_t>(shape.cap) * static_cast<std::size_t>(shape.topk) * returned.row_bytes();
  }
};

}  // namespace heddle
