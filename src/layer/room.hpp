// How much can arrive at a rank in one call, from options alone: what its experts' memory is made for before any call.
#pragma once

#include <cstddef>

#include "heddle/exchange.hpp"

namespace heddle {

struct RankRoom {
  int own_tokens = 0;       ///< this rank's own tokens in a round trip
  int arrived_tokens = 0;   ///< of all ranks
  int pairs = 0;            ///< of an arrived token and a local expert
  std::size_t rows = 0;     ///< places of arrived rows, padding included: Arrived::room at most
  std::size_t results = 0;  ///< rows of results, as combine_send takes them
};

/// Bounds for a rank of `local_experts` experts, whatever is routed where. Throws InputError where pairs are more than experts
/// on a GPU can be made for (2^25), naming a cap that fits.
RankRoom room_of(const ExchangeOptions& options, int local_experts);

}  // namespace heddle
