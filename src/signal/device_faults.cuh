// What a kernel does rarely or slowly anyway: giving up, long waits, meetings of many CTAs, the delays of tests. Kept
// out of line, so that whoever does not need it steps over none of it.
#pragma once

#include <cstdint>

#include "signal/device_team.hpp"
#include "signal/ptx.cuh"

namespace heddle {

/// Before a rank leaves because of another's fault: that rank's record for the host, in this rank's place, since the other
/// may live in another process. One lane; what several of them write is the same.
__device__ __noinline__ inline void hear_of_fault(const DeviceTeam& team, int rank) {
  const Word code = ptx::load_acquire_system(&team.heap.at<HeapHeader>(rank, 0)->abort);
  // An own record is in its place already, or, under a word of all ones, on its way.
  if (code == 0 || code == static_cast<Word>(rank) + 1 || code > static_cast<Word>(team.heap.ranks)) return;
  HostFault* host = team.host_faults + (rank - team.heap.rank);
  host->record = team.heap.at<HeapHeader>(static_cast<int>(code) - 1, 0)->fault;
  __threadfence_system();
  ptx::store_release_system(&host->raised, 1);
}

/// Gives up: a record in this rank's part, for the host as well, then the abort word of every rank. The record is this rank's own,
/// or of a rank of another node. One lane.
__device__ __noinline__ inline void give_up(const DeviceTeam& team, int rank, const FaultRecord& record) {
  auto* header = team.heap.at<HeapHeader>(rank, 0);
  const Word code = static_cast<Word>(rank) + 1;
  if (ptx::compare_exchange_system(&header->abort, 0, ~Word{0}) != 0) {
    hear_of_fault(team, rank);
    return;
  }
  header->fault = record;
  HostFault* host = team.host_faults + (rank - team.heap.rank);
  host->record = record;
  __threadfence_system();
  ptx::store_release_system(&host->raised, 1);
  ptx::store_release_system(&header->abort, code);
  for (int peer = 0; peer < team.heap.ranks; ++peer) {
    if (peer != rank) ptx::compare_exchange_system(&team.heap.at<HeapHeader>(peer, 0)->abort, 0, code);
  }
}
__device__ inline void give_up(const DeviceTeam& team, int rank, WordName name, std::uint64_t expected, std::uint64_t seen) {
  give_up(team, rank, {name, rank, expected, seen});
}

/// Whether a rank's own workers write a word.
__device__ inline bool is_of_fellows(const WordName& name, int rank) {
  const bool mega = name.kind >= WordKind::mega_announced && name.kind <= WordKind::mega_ready;
  return name.kind == WordKind::team || (mega && name.peer == rank);
}

/// In a wait that began at `since` (0: now) and saw `seen` last: since when it has waited, or 0 where it has to end.
__device__ __noinline__ inline std::uint64_t go_on_waiting(const DeviceTeam& team, int rank, std::uint64_t since, WordName name,
                                                           std::uint64_t expected, std::uint64_t seen) {
  const std::uint64_t now = ptx::nanoseconds();
  if (ptx::load_relaxed_system(&team.heap.at<HeapHeader>(rank, 0)->abort) != 0) {
    hear_of_fault(team, rank);
    return 0;
  }
  if (since == 0) return now;
  const std::uint64_t deadline = *static_cast<const volatile std::uint64_t*>(&team.settings->deadline_nanoseconds);
  // Of fellow workers' words longer than of any other: a fellow that waits for another rank names that rank first.
  const int halves = is_of_fellows(name, rank) ? 3 : 2;
  if (now - since <= deadline / 2 * halves) return since;
  give_up(team, rank, name, expected, seen);
  return 0;
}

/// A wait that may be for fellow workers: while they move rows or finish tasks, nobody is missing. One lane.
struct FellowWait {
  std::uint64_t since = 0;
  Word moved = 0;

  __device__ __noinline__ bool go_on(const DeviceTeam& team, int rank, WordName name, std::uint64_t expected, std::uint64_t seen) {
    if (is_of_fellows(name, rank)) {
      const Word progress = ptx::load_relaxed_system(&team.counters[rank - team.heap.rank].moved);
      if (progress != moved) since = 0;
      moved = progress;
    }
    since = go_on_waiting(team, rank, since, missing(team, rank, name, expected, seen), expected, seen);
    return since != 0;
  }

 private:
  /// Whose absence a wait is for: a fellow's word, or the CTAs of this rank that have not begun.
  __device__ static WordName missing(const DeviceTeam& team, int rank, const WordName& name, std::uint64_t& expected,
                                     std::uint64_t& seen) {
    if (!is_of_fellows(name, rank) || name.kind == WordKind::team) return name;
    const Word begun = ptx::load_relaxed_system(&team.counters[rank - team.heap.rank].begun);
    if (begun >= gridDim.x) return name;
    expected = gridDim.x;
    seen = begun;
    return {WordKind::team, rank, -1};
  }
};

/// One more CTA of a rank has come, as many as this launch has: was it the last one? That one makes room for the next meeting.
__device__ inline bool come_last(Word& met) {
  constexpr Word next = Word{1} << 32;
  return ptx::add_acquire_release_gpu(&met, 1) % next + 1 == gridDim.x;
}
__device__ inline void end_meeting(Word& met) {
  constexpr Word next = Word{1} << 32;
  ptx::add_relaxed_gpu(&met, next - gridDim.x);
}

/// All CTAs of a rank meet, as many as this launch has: each adds to a counter; the last one takes them off again and begins
/// the next meeting, whose number is in the upper half. False on abort.
__device__ __noinline__ inline bool meet_by_counting(const DeviceTeam& team, int rank) {
  __syncthreads();
  bool fine = true;
  if (threadIdx.x == 0) {
    constexpr Word next = Word{1} << 32;
    TeamCounters* counters = &team.counters[rank - team.heap.rank];
    Word* met = &counters->met;
    const Word before = ptx::add_acquire_release_gpu(met, 1);
    const bool last = before % next + 1 == gridDim.x;
    if (last) ptx::add_acquire_release_gpu(met, next - gridDim.x);
    std::uint64_t since = 0;
    Word moved = 0;
    for (std::uint32_t look = 0; fine && !last; ++look) {
      const Word seen = ptx::load_acquire_gpu(met);
      if (seen / next != before / next) break;
      if (look % 64 != 0) continue;
      // While fellow workers move rows nobody is missing.
      const Word progress = ptx::load_relaxed_system(&counters->moved);
      if (progress != moved) since = 0;
      moved = progress;
      since = go_on_waiting(team, rank, since, {WordKind::team, rank, -1}, gridDim.x, seen % next);
      fine = since != 0;
    }
  }
  return __syncthreads_and(static_cast<int>(fine)) != 0;
}

/// Sleeps now and then; returns the next state of the draw. All lanes of the warp alike.
__device__ __noinline__ inline std::uint32_t delay(const DeviceSettings& settings, int worker, std::uint32_t state) {
  state = state * 1664525u + 1013904223u + settings.delay_seed + static_cast<std::uint32_t>(worker) * 2654435761u;
  if ((state >> 28) == 0) __nanosleep((state >> 4) % settings.delay_nanoseconds);
  __syncwarp();
  return state;
}

}  // namespace heddle
