// Counters of one exchange on one GPU, host side: their device memory, and copies of it while kernels run.
#pragma once

#include <mutex>
#include <span>

#include "heddle/device.hpp"
#include "heddle/exchange.hpp"
#include "signal/tally.hpp"

namespace heddle {

class DeviceTallies {
 public:
  DeviceTallies(int device, const TallyPlan& plan, int local_ranks);
  ~DeviceTallies();
  DeviceTallies(const DeviceTallies&) = delete;
  DeviceTallies& operator=(const DeviceTallies&) = delete;

  Tally* data() const { return tallies_; }  ///< [local ranks, plan.size()]
  const TallyPlan& plan() const { return plan_; }
  /// May be called from several threads.
  ExchangeCounters read(int local, const Placement& placement, int local_experts);

 private:
  /// A copy of one rank's counters, both sets whole.
  std::span<const Tally> copy(int local);

  int device_;
  TallyPlan plan_;
  std::mutex reading_;
  CUstream_st* stream_ = nullptr;  ///< beside those of the exchange: a copy waits for no kernel
  Tally* tallies_ = nullptr;
  Tally* copied_ = nullptr;  ///< pinned, a rank's
};

}  // namespace heddle
