// What the tests of counters share.
#pragma once

#include <algorithm>

#include "gpu/device_run.hpp"

namespace heddle {

inline DeviceExchangeOptions counting() {
  DeviceExchangeOptions options;
  options.counters = true;
  return options;
}

inline int ranks_here() { return 2 * std::max(2, gpus_here()); }

inline ExchangeCounters counters_of_rank(DeviceRun& run, int rank) {
  const std::size_t gpu = run.gpu_of(rank);
  return run.exchange(0, gpu).counters(rank - run.workspace().first_rank(gpu));
}

/// Rows of results in any layout.
inline int rows_at_most(const Case& c) {
  const int local = c.options.placement.max_local_experts();
  return c.ranks() * c.options.cap * std::max(local, c.options.topk) + 128 * (local + 1);
}

}  // namespace heddle
