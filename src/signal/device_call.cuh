// A warp in a call: which rank's it is, which call, what its squad shares, and how it gives up. What all its verbs stand on
// (device_words.cuh, device_worker.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "signal/device_bulk.cuh"
#include "signal/device_faults.cuh"
#include "signal/device_numbers.cuh"
#include "signal/device_roles.cuh"
#include "signal/device_team.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"
#include "trace/device.cuh"

namespace heddle {

template <RowMover mover, class Place>
class WarpInCall : public WarpNumbers, public Place, protected BulkRing<mover == RowMover::bulk> {
 protected:
  static constexpr bool bulk = mover == RowMover::bulk;
  using Ring = BulkRing<bulk>;

 public:
  static constexpr bool is_warp = true;

  /// `shared`: the squad's memory, `shared_bytes` of it, and behind it with bulk copies bulk_ring_bytes more; `bulk_bytes`: the
  /// least that they take.
  __device__ WarpInCall(const DeviceTeam& team, CallPart part, std::byte* shared, std::size_t shared_bytes, int bulk_bytes = 0)
      : WarpNumbers(static_cast<int>(threadIdx.x) % lanes_of_warp),
        Ring(lane(), shared + shared_bytes, bulk_bytes),
        team_(team),
        heap_(team.heap),
        shared_(shared),
        shared_end_(shared + shared_bytes) {
    heap_.rank += static_cast<int>(blockIdx.y);
    trace::begin_warp();
    // Everything is asked for before anything is looked at.
    const bool begins = part == CallPart::dispatch_send;
    const Word epoch = ptx::load_relaxed_system(begins ? &header()->epoch : &header()->call);
    const Word used = part == CallPart::dispatch_receive ? ptx::load_relaxed_system(&header()->epoch) : ~epoch;
    const Word abort = ptx::load_relaxed_system(&header()->abort);
    longest_delay_ = team.settings->delay_nanoseconds;
    all_live_ = team.settings->all_live != 0;
    // To receive without having sent is to wait for a call that nobody has begun.
    epoch_ = static_cast<std::uint32_t>(epoch) + (begins || epoch == used ? 1 : 0);
    // For the whole squad alike: warps that leave by themselves would be missed at its barriers.
    aborted_at_start_ = __syncthreads_or(static_cast<int>(abort != 0)) != 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (begins) ptx::store_relaxed_system(&header()->call, epoch_);
      if (part == CallPart::combine) ptx::store_relaxed_system(&header()->epoch, epoch_);
    }
  }

  /// In a role.
  __device__ WarpInCall(const DeviceTeam& team, const BegunCall& begun, const Place& place)
      : WarpNumbers(static_cast<int>(threadIdx.x) % lanes_of_warp),
        Place(place),
        Ring(lane(), nullptr, 0),
        team_(team),
        heap_(begun.heap),
        shared_(nullptr),
        shared_end_(nullptr),
        epoch_(begun.epoch),
        longest_delay_(begun.longest_delay),
        all_live_(begun.all_live) {
    static_assert(!bulk, "a bulk ring is a warp's from the launch on");
  }

  using Place::count;
  using Place::first_squad;
  using Place::index;
  using Place::squad_count;
  using Place::squad_index;
  using WarpNumbers::lanes_of_warp;
  __device__ const HeapView& heap() const { return heap_; }
  __device__ std::uint32_t epoch() const { return epoch_; }
  __device__ bool all_live() const { return all_live_; }
  __device__ bool live(int rank) const { return all_live_ || team_.settings->live[rank] != 0; }

  /// The abort word as this launch found it; waits look at it anew.
  __device__ bool begin() {
    verb();
    if (aborted_at_start_ && lane() == 0) hear_of_fault(team_, heap_.rank);
    return !aborted_at_start_;
  }

  /// n values that the squad shares until the launch ends; null if there is no room. All warps of the squad make the same calls.
  __device__ std::int32_t* squad_array(int n) {
    const std::size_t bytes = align_up(static_cast<std::size_t>(n) * sizeof(std::int32_t), 16);
    if (bytes > static_cast<std::size_t>(shared_end_ - shared_)) return nullptr;
    auto* array = reinterpret_cast<std::int32_t*>(shared_);
    shared_ += bytes;
    return array;
  }

  /// Gives up, by one lane or by several that say the same; returns false.
  __device__ bool fail(const WordName& name, std::uint64_t expected, std::uint64_t seen) {
    give_up(team_, heap_.rank, name, expected, seen);
    return false;
  }
  __device__ bool aborted() const { return ptx::load_relaxed_system(&header()->abort) != 0; }

 protected:
  __device__ HeapHeader* header() const { return heap_.template mine<HeapHeader>(0); }
  __device__ TeamCounters* counters() const { return team_.counters + blockIdx.y; }
  /// One thread a rank, where the host wants to know.
  __device__ bool times_waits() const { return team_.tallies != nullptr && first_squad() && threadIdx.x == 0; }
  __device__ std::uint64_t deadline() const {
    return *static_cast<const volatile std::uint64_t*>(&team_.settings->deadline_nanoseconds);
  }

  /// Tests inject delays here.
  __device__ void verb() {
    if constexpr (!Place::delays) return;
    if (longest_delay_ != 0) delays_ = delay(*team_.settings, index(), delays_);
  }

  /// Memory was ordered, or this warp writes what a bulk copy may read: the next one comes after it.
  __device__ void order() {
    if constexpr (bulk) Ring::order();
  }

  const DeviceTeam& team_;
  HeapView heap_;
  std::byte* shared_;
  std::byte* shared_end_;
  std::uint32_t epoch_ = 0;
  std::uint32_t delays_ = 0;
  std::uint32_t longest_delay_ = 0;
  bool all_live_ = true;
  bool aborted_at_start_ = false;
};

}  // namespace heddle
