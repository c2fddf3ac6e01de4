// The recorder of a warp, in kernels built with HEDDLE_TRACE; empty in all others.
//
//   const trace::WarpLane lane(trace::trace_of(call.team), trace::Role::rows, 0);   // as long as the role lasts
//   ...
//   const trace::WarpSpan span(trace::Kind::rows, task);                            // until the end of the block
//
// Nothing is handed around: what a warp needs lies in shared memory. Lane 0 records; other lanes may make the calls or not. Stores
// are predicated and no branch stands in a span, so that the loops around it stay uniform for the compiler.
#pragma once

#include "trace/device.hpp"

#if defined(HEDDLE_TRACE)
#include <cstddef>

#include "trace/device_cells.cuh"
#endif

namespace heddle::trace {

/// A span that is of no task.
struct NoTask {};
/// Waits of those who fill a ring.
enum class Room : std::uint8_t { wait };
/// Which of a reader's summed waits a ring is; a member of it only with HEDDLE_TRACE, see trace_of.
template <class Ring>
__device__ void note_wait([[maybe_unused]] Ring& ring, [[maybe_unused]] int wait) {
  if constexpr (kernels_record) ring.summed_wait = wait;
}

#if defined(HEDDLE_TRACE)

__device__ inline TaskNote note_of(const NoTask&) { return {}; }

class WarpLane {
 public:
  /// `number`: among the warps of this role in the CTA. `records`: whether this warp's spans are kept; of warps that do the same,
  /// one is enough.
  __device__ WarpLane(DeviceTrace trace, Role role, int number, bool records = true) : trace_(trace) {
    const bool wanted = records && trace.records != nullptr;
    detail::open_cell(wanted ? first() + records_of_head : nullptr, wanted ? trace.room - records_of_head : 0);
    if (!wanted || !detail::is_first_lane()) return;
    head().opened = 1;
    head().role = static_cast<std::uint32_t>(role);
    head().number = static_cast<std::uint32_t>(number);
    stamp(0);
  }
  __device__ ~WarpLane() {
    if (!detail::is_first_lane() || !detail::is_cell_open()) return;
    head().spans = detail::spans_of_cell();
    stamp(1);
  }
  WarpLane(const WarpLane&) = delete;
  WarpLane& operator=(const WarpLane&) = delete;

 private:
  __device__ DeviceRecord* first() const {
    const std::size_t cta = static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    return trace_.records + (cta * (blockDim.x / 32) + threadIdx.x / 32) * static_cast<std::size_t>(trace_.room);
  }
  __device__ DeviceLaneHead& head() const { return *reinterpret_cast<DeviceLaneHead*>(first()); }
  __device__ void stamp(int which) const {
    head().nanoseconds[which] = detail::globaltimer();
    head().clocks[which] = static_cast<std::uint64_t>(clock64());
  }

  DeviceTrace trace_;
};

/// A span for the time of its life. The task, which outlives it, is looked at in the end: note_of(task) tells it, and `product`, if
/// that does not know.
template <class Noted = NoTask>
class WarpSpan {
 public:
  __device__ explicit WarpSpan(Kind kind) : WarpSpan(kind, NoTask{}) {}
  __device__ WarpSpan(Kind kind, const Noted& task, Product product = Product::none)
      : begin_(detail::clock32()), kind_(kind), product_(product), task_(task) {
    detail::clear_waits();
  }
  __device__ ~WarpSpan() { end(); }
  /// Here it ends, and one of the same task begins.
  __device__ void turn(Kind next) {
    end();
    begin_ = detail::clock32();
    kind_ = next;
    detail::clear_waits();
  }
  WarpSpan(const WarpSpan&) = delete;
  WarpSpan& operator=(const WarpSpan&) = delete;

 private:
  __device__ void end() const {
    TaskNote note = note_of(task_);
    if (product_ != Product::none) note.product = product_;
    detail::put(begin_, kind_, static_cast<unsigned>(note.product), note.expert, note.block, note.part, note.rows);
  }
  using Held = std::conditional_t<std::is_empty_v<Noted>, Noted, const Noted&>;

  std::uint32_t begin_;
  Kind kind_;
  Product product_;
  [[no_unique_address]] Held task_;
};
WarpSpan(Kind)->WarpSpan<NoTask>;

/// Likewise a wait for a word.
class WarpWait {
 public:
  __device__ explicit WarpWait(const WordName& word) : begin_(detail::clock32()), word_(word) {}
  /// For n words side by side: one of another rank stands for them, if there is one.
  template <class NameOf>
  __device__ WarpWait(int n, const NameOf& name) : begin_(detail::clock32()) {
#pragma unroll 1
    for (int i = 0; i < n && (word_.kind == WordKind::none || word_.kind == WordKind::team); ++i) word_ = name(i);
    if (n > 1) word_.peer = -1;
  }
  __device__ ~WarpWait() { detail::put(begin_, Kind::wait, static_cast<unsigned>(word_.kind), word_.peer, word_.index, 0, 0); }
  WarpWait(const WarpWait&) = delete;
  WarpWait& operator=(const WarpWait&) = delete;

 private:
  std::uint32_t begin_;
  WordName word_;
};

/// A wait for a ring in shared memory, summed up in the innermost WarpSpan: of those who read it as that wait which the ring says,
/// of those who fill it as their second one.
class WarpSum {
 public:
  template <class Ring>
  __device__ explicit WarpSum(const Ring& ring) : begin_(detail::clock32()), which_(ring.summed_wait) {}
  __device__ explicit WarpSum(Room) : begin_(detail::clock32()), which_(1) {}
  __device__ ~WarpSum() { detail::add_wait(which_, detail::clock32() - begin_); }
  WarpSum(const WarpSum&) = delete;
  WarpSum& operator=(const WarpSum&) = delete;

 private:
  std::uint32_t begin_;
  int which_;
};

/// A warp of a kernel records nothing until it has a lane.
__device__ inline void begin_warp() { detail::open_cell(nullptr, 0); }

#else

class WarpLane {
 public:
  __device__ WarpLane(DeviceTrace, Role, int, bool = true) {}
};
template <class Noted = NoTask>
class WarpSpan {
 public:
  __device__ explicit WarpSpan(Kind) {}
  __device__ WarpSpan(Kind, const Noted&, Product = Product::none) {}
  __device__ void turn(Kind) {}
};
WarpSpan(Kind)->WarpSpan<NoTask>;
class WarpWait {
 public:
  __device__ explicit WarpWait(const WordName&) {}
  template <class NameOf>
  __device__ WarpWait(int, const NameOf&) {}
};
class WarpSum {
 public:
  template <class Ring>
  __device__ explicit WarpSum(const Ring&) {}
};
__device__ inline void begin_warp() {}

#endif

}  // namespace heddle::trace
