// Where kernels built with HEDDLE_TRACE leave their time stamps, for the host, too. Without it all of this is empty, and so is what
// device.cuh makes of it: the machine code is that of kernels without a recorder.
#pragma once

#include <cstdint>

#include "heddle/formats.hpp"
#include "trace/span.hpp"

namespace heddle::trace {

/// Warps of a CTA that there are cells for (device_cells.cuh); kernels whose warps open lanes assert that they have no more.
inline constexpr int most_warps = 20;
constexpr bool fits_cells(int threads) { return threads <= 32 * most_warps; }

#if defined(HEDDLE_TRACE)

inline constexpr bool kernels_record = true;
inline constexpr int cell_bytes = most_warps * 24;  ///< of a CTA's shared memory, beside what the kernel asks for

/// A span as a warp leaves it. Times are the SM's own cycles (clock64): they take a few of them to read, and waits in a ring are
/// tens of nanoseconds, while globaltimer may stand still for longer than that. A lane's two pairs of both clocks tie them.
struct alignas(16) DeviceRecord {
  std::uint64_t end = 0;
  std::uint32_t ticks = 0;  ///< its length, at most some two seconds
  std::uint32_t waited[summed_waits] = {};
  std::uint8_t kind = 0;
  std::uint8_t what = 0;    ///< the Product; of Kind::wait the WordKind
  std::int16_t expert = 0;  ///< of a wait the rank
  std::int32_t block = 0;   ///< of a wait the word's index; of the fused layer generation << 16 | place in the ring
  std::int16_t part = 0;
  std::int16_t rows = 0;
};
static_assert(sizeof(DeviceRecord) == 32);

/// The head of a lane's records, in the place of the first ones.
struct alignas(16) DeviceLaneHead {
  std::uint64_t clocks[2] = {};       ///< when the lane was opened and closed
  std::uint64_t nanoseconds[2] = {};  ///< globaltimer then
  std::uint32_t opened = 0;           ///< 1; a lane that nobody opened is 0
  std::uint32_t role = 0;
  std::uint32_t number = 0;
  std::uint32_t spans = 0;  ///< recorded, of which those that found room are there
};
inline constexpr int records_of_head = 2;
static_assert(sizeof(DeviceLaneHead) <= records_of_head * sizeof(DeviceRecord));

/// What a launch records into; without records nothing. Zeroed before.
struct DeviceTrace {
  DeviceRecord* records = nullptr;  ///< [ranks, CTAs, warps of a CTA, room], a lane a warp
  std::int32_t room = 0;            ///< of a lane, its head included
};

#else

inline constexpr bool kernels_record = false;
inline constexpr int cell_bytes = 0;
struct DeviceTrace {};

#endif

/// What a call with such a member `recorded` records into. A member only with HEDDLE_TRACE: nvcc gives an empty one, too, a place
/// in a kernel's parameters that the host does not.
template <class Call>
HEDDLE_HOST_DEVICE DeviceTrace trace_of([[maybe_unused]] const Call& call) {
  if constexpr (kernels_record) {
    return call.recorded;
  } else {
    return {};
  }
}

}  // namespace heddle::trace
