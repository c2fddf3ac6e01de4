// The hands of the dispatch warps: rows by bulk copies through a ring of the CTA's memory. One lane asks for all of it, so several
// rows are on their way at once, and the warp holds none of their bytes.
#pragma once

#include "mega/sm90/shared.cuh"

namespace heddle::sm90 {

/// A MegaWorker whose rows are under way until complete_all().
class PullWorker : public MegaWorker {
 public:
  /// `gate`: a barrier that opens once the first rows have been asked for, or there are none. Weights wait behind it: so many bytes
  /// of theirs would stand before the rows in the SM's queue of bulk copies.
  __device__ PullWorker(const DeviceTeam& team, const BegunCall& begun, const RoleWarp& place, PullMemory& memory,
                        std::uint64_t& gate)
      : MegaWorker(team, begun, place), memory_(memory), gate_(gate) {
    if (lane() == 0) {
      for (std::uint64_t& barrier : memory_.loaded) ptx::make_barrier(ptx::shared_address(&barrier), 1);
      ptx::fence_new_barriers();
    }
    __syncwarp();
  }

  /// Rows' sources and places are multiples of 16 bytes.
  template <class To>
  __device__ void copy_row_to(int, To to, const std::byte* from, const RowFormat& format, const RowPart&) {
    std::byte* const place = to(0);
    if (lane() != 0) return;
    // Behind the words that say that both may be touched: whoever waited for one has completed all before.
    if (started_ == stored_) ptx::fence_global_proxies();
    const auto bytes = static_cast<std::uint32_t>(format.row_bytes());
#pragma unroll 1
    for (std::uint32_t at = 0; at < bytes; at += pull_slot_bytes) start(place + at, from + at, min(bytes - at, pull_slot_bytes));
  }
  __device__ void complete_all() {
    open_gate();
    if (lane() == 0) {
      while (stored_ != started_) store_oldest();
      ptx::wait_until_written();
      ptx::fence_global_proxies();
    }
    __syncwarp();
  }

  __device__ void open_gate() {
    __syncwarp();
    if ((lane() == 0 || arrivals_a_warp > 1) && !opened_) cutlass::arch::ClusterBarrier::arrive(&gate_);
    opened_ = true;
  }

 private:
  __device__ void start(std::byte* to, const std::byte* from, std::uint32_t bytes) {
    if (started_ - stored_ == pull_slots) store_oldest();
    const std::uint32_t slot = started_ % pull_slots;
    wait_for_slot();
    memory_.to[slot] = to;
    memory_.bytes[slot] = bytes;
    const std::uint32_t barrier = ptx::shared_address(&memory_.loaded[slot]);
    ptx::arrive_expecting(barrier, bytes);
    ptx::load_bulk(ptx::shared_address(memory_.slots[slot]), from, bytes, barrier);
    ++started_;
  }
  /// What lay in the next slot has left it: it was stored `pull_slots` copies ago, so all but the stores behind that one must have
  /// been read.
  __device__ void wait_for_slot() const {
    static_assert(pull_slots == 4);
    switch (started_ - stored_) {
      case 0:
        return ptx::wait_until_read<3>();
      case 1:
        return ptx::wait_until_read<2>();
      case 2:
        return ptx::wait_until_read<1>();
      default:
        return ptx::wait_until_read<0>();
    }
  }
  __device__ void store_oldest() {
    const std::uint32_t slot = stored_ % pull_slots;
    while (!ptx::wait_for_phase(ptx::shared_address(&memory_.loaded[slot]), stored_ / pull_slots & 1)) {
    }
    ptx::store_bulk(memory_.to[slot], ptx::shared_address(memory_.slots[slot]), memory_.bytes[slot]);
    ptx::commit_stores();
    ++stored_;
  }

  PullMemory& memory_;
  std::uint64_t& gate_;
  bool opened_ = false;
  std::uint32_t started_ = 0;
  std::uint32_t stored_ = 0;
};

}  // namespace heddle::sm90
