// A ring of stages in shared memory between a role that fills and roles that read, on mbarriers.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "experts/sm90/tile.hpp"
#include "signal/ptx.cuh"
#include "trace/device.cuh"

namespace heddle::sm90 {

/// How often a warp arrives at a barrier for what its lanes have done. Once is enough, by one lane behind a barrier of the warp.
/// But compute-sanitizer's racecheck takes an arrival for what that lane itself has done, and would call all else a race: built
/// with HEDDLE_RACECHECK every lane arrives.
#if defined(HEDDLE_RACECHECK)
inline constexpr int arrivals_a_warp = 32;
#else
inline constexpr int arrivals_a_warp = 1;
#endif

/// Where a role is in a ring. Both sides start at stage 0 and go round in the same order.
template <int stages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;  ///< that a reader waits for

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// Tells the compiler that all lanes of the warp stand at the same place: it forgets where branches of single lanes lie between.
  __device__ void settle() {
    stage = ptx::uniform(stage);
    parity = static_cast<std::uint32_t>(ptx::uniform(static_cast<int>(parity)));
  }
};

/// The barriers of a ring: `full` completes when a stage has been filled, `empty` when all of its readers have left it.
template <int stages>
struct RingBarriers {
  std::uint64_t full[stages];
  std::uint64_t empty[stages];
#if defined(HEDDLE_TRACE)
  int summed_wait;  ///< see create
#endif

  /// By one thread, before anybody uses the ring. `fillers` arrive at a stage to fill it; readers are warps. `wait`: which of a
  /// reader's two summed waits this ring is in a trace.
  __device__ void create(int fillers, int readers, int wait = 0) {
    trace::note_wait(*this, wait);
    for (int stage = 0; stage < stages; ++stage) {
      cutlass::arch::ClusterBarrier::init(&full[stage], static_cast<std::uint32_t>(fillers));
      cutlass::arch::ClusterBarrier::init(&empty[stage], static_cast<std::uint32_t>(readers * arrivals_a_warp));
    }
  }
  __device__ void wait_full(const RingPosition<stages>& at) const {
    if (trace::kernels_record && is_full(at)) return;
    const trace::WarpSum waiting(*this);
    cutlass::arch::ClusterBarrier::wait(&full[at.stage], at.parity);
  }
  __device__ bool is_full(const RingPosition<stages>& at) const {
    return cutlass::arch::ClusterBarrier::test_wait(&full[at.stage], at.parity, 1);
  }
  /// The first round finds every stage empty: the parity before a barrier's first phase counts as done.
  __device__ void wait_empty(const RingPosition<stages>& at) const {
    if (trace::kernels_record && cutlass::arch::ClusterBarrier::test_wait(&empty[at.stage], at.parity ^ 1, 1)) return;
    const trace::WarpSum waiting(trace::Room::wait);
    cutlass::arch::ClusterBarrier::wait(&empty[at.stage], at.parity ^ 1);
  }
  /// By all lanes of a warp that have read the stage, or stored into it. Who reads with loads must have *used* what they brought:
  /// an arrival does not wait for loads that are under way, and a stage that bulk copies fill anew is then overwritten before them.
  __device__ void leave_together(const RingPosition<stages>& at) const {
    __syncwarp();
    if (speaks()) leave(at);
  }
  __device__ void filled_together(const RingPosition<stages>& at) const {
    __syncwarp();
    if (speaks()) filled(at);
  }
  __device__ void leave(const RingPosition<stages>& at) const { cutlass::arch::ClusterBarrier::arrive(&empty[at.stage]); }
  __device__ void filled(const RingPosition<stages>& at) const { cutlass::arch::ClusterBarrier::arrive(&full[at.stage]); }
  __device__ void expect(const RingPosition<stages>& at, int bytes) const {
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&full[at.stage], static_cast<std::uint32_t>(bytes));
  }

 private:
  __device__ static bool speaks() { return arrivals_a_warp > 1 || threadIdx.x % warp_threads == 0; }
};

/// Puts entries into a ring of them. By one thread.
template <class Entry, int stages>
class EntryWriter {
 public:
  __device__ EntryWriter(Entry (&entries)[stages], RingBarriers<stages>& ring) : entries_(entries), ring_(ring) {}

  __device__ void put(const Entry& entry) {
    ring_.wait_empty(at_);
    entries_[at_.stage] = entry;
    ring_.filled(at_);
    at_.advance();
  }

 private:
  Entry (&entries_)[stages];
  RingBarriers<stages>& ring_;
  RingPosition<stages> at_;
};

}  // namespace heddle::sm90
