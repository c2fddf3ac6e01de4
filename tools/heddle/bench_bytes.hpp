// What has to move in a round trip, by the routing, and how long that takes at least.
#pragma once

#include "bench_batch.hpp"
#include "heddle/exchange.hpp"

namespace heddle::tool {

/// Copies of tokens that must reach a rank's experts, and rows that come back: of the GPU with most to send to others.
/// Bytes of rows alone, without padding and routing.
struct Traffic {
  double remote_rows = 0;  ///< that cross the link out of that GPU, in dispatch and combine together
  double remote_bytes = 0;
  double local_rows = 0;  ///< that stay on it, in both directions
  double local_bytes = 0;
  double floor_seconds = 0;  ///< of dispatch and combine, see below
};

/// Rates are the H200's as measured (heddle plan --machine h200). The floor of a phase is the greatest of what a GPU sends or
/// receives over the link's rate and, for copies read and written once, twice its bytes over the memory's copy rate.
Traffic traffic_of(const ExchangeOptions& options, const Batch& batch, int tokens);

/// The link's measured rate in bytes/s.
double link_rate();
/// Two words' way to another GPU, one in dispatch and one in combine; 0 on a single GPU.
double word_seconds(const Lanes& lanes);

}  // namespace heddle::tool
