// What kernels are given beside their work: the heap, settings that the host may change at any time, and
// where faults are shown to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/group.hpp"
#include "signal/tally.hpp"
#include "signal/words.hpp"
#include "trace/device.hpp"

namespace heddle {

/// What the host may change between launches or replays without touching a graph. Lies in device memory.
struct DeviceSettings {
  std::uint64_t deadline_nanoseconds = 0;
  std::uint32_t delay_nanoseconds = 0;  ///< tests: longest sleep before a verb
  std::uint32_t delay_seed = 0;
  std::uint32_t all_live = 1;     ///< 0: `live` must be looked at
  unsigned char live[1024] = {};  ///< [ranks], 0: masked
};

/// Where the host sees a fault without stopping a stream: mapped host memory, one a rank.
struct HostFault {
  Word raised = 0;  ///< 1 once `record` is complete
  FaultRecord record;
};

/// How the CTAs of one rank meet where hardware does not do it: arrivals at a meeting, and in the upper half how many meetings
/// there have been. No arrivals when nothing runs, but after a fault; so launches may have different numbers of CTAs.
struct alignas(32) TeamCounters {
  Word met = 0;
  Word waited = 0;  ///< nanoseconds that the first squad waited and no call has counted yet; only with tallies
  Word moved = 0;   ///< counts what note_progress() told
  Word begun = 0;   ///< CTAs that have joined a launch whose warps have roles and that has not ended
  Word rested = 0;  ///< nanoseconds: the most that a warp told by note_rests() and no call has counted yet; only with tallies
};

/// How a kernel moves rows: any wire; bf16 alone, without any conversion; the same, long ones by bulk copies (device_bulk.cuh).
enum class RowMover : std::uint8_t { any, plain, bulk };

constexpr int bulk_slot_bytes = 4096;
constexpr int bulk_slots = 32;  ///< of all warps of a CTA: two each of 16, four of 8
/// Shared memory that bulk copies want of a CTA: slots, a barrier each, and room to align them.
constexpr std::size_t bulk_ring_bytes = bulk_slots * (bulk_slot_bytes + sizeof(std::uint64_t)) + 128;

struct DeviceTeam {
  HeapView heap;  ///< of the first rank of this launch
  DeviceSettings* settings = nullptr;
  HostFault* host_faults = nullptr;  ///< [ranks of this launch]
  TeamCounters* counters = nullptr;  ///< [ranks of this launch], one set an exchange
  Tally* tallies = nullptr;          ///< of the first rank of this launch, see TallyPlan; null: nothing is counted
#if defined(HEDDLE_TRACE)
  trace::DeviceTrace recorded{};
#endif
};

}  // namespace heddle
