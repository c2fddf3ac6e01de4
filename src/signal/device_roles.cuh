// Which of a rank's workers a warp is, and how launches whose warps have roles take part in a call.
#pragma once

#include <cstdint>

#include "signal/device_faults.cuh"
#include "signal/device_numbers.cuh"
#include "signal/device_team.hpp"
#include "signal/ptx.cuh"

namespace heddle {

/// Which worker a warp is: one of all warps of the launch's CTAs, and a CTA is a squad.
struct WholeCta {
  static constexpr bool delays = true;  ///< whether tests inject delays into its verbs
  __device__ int squad_index() const { return static_cast<int>(threadIdx.x) / WarpNumbers::lanes_of_warp; }
  __device__ int squad_count() const { return static_cast<int>(blockDim.x) / WarpNumbers::lanes_of_warp; }
  __device__ bool first_squad() const { return blockIdx.x == 0; }
  __device__ int squad() const { return static_cast<int>(blockIdx.x); }
  __device__ int squads() const { return static_cast<int>(gridDim.x); }
  __device__ int index() const { return static_cast<int>(blockIdx.x) * squad_count() + squad_index(); }
  __device__ int count() const { return static_cast<int>(gridDim.x) * squad_count(); }
};

/// The same numbered over CTAs first: a few items are then many CTAs' work.
struct SpreadCta : WholeCta {
  __device__ int index() const { return squad_index() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); }
};

/// One of the warps that share a role where the warps of a CTA have several: squads of one, without memory of their own. So none
/// of its verbs is a barrier of the CTA.
struct RoleWarp {
  static constexpr bool delays = true;
  int number = 0;
  int of = 1;

  __device__ int squad_index() const { return 0; }
  __device__ int squad_count() const { return 1; }
  __device__ bool first_squad() const { return number == 0; }
  __device__ int index() const { return number; }
  __device__ int count() const { return of; }
};

/// One that tells others while its products run: without delays, since a call of a function would cost all of its uniform
/// registers.
struct MathWarp : RoleWarp {
  static constexpr bool delays = false;
};

/// What a worker knows of its call from the beginning on.
struct BegunCall {
  HeapView heap;
  std::uint32_t epoch = 0;
  std::uint32_t longest_delay = 0;
  bool all_live = true;
};

/// A launch whose warps have roles takes part in the call that an earlier launch has begun. By one thread of the CTA; false where
/// the rank is masked or the call has ended already.
__device__ inline bool join_call(const DeviceTeam& team, BegunCall& begun) {
  begun.heap = team.heap;
  begun.heap.rank += static_cast<int>(blockIdx.y);
  auto* header = begun.heap.template mine<HeapHeader>(0);
  const Word call = ptx::load_relaxed_system(&header->call);
  const Word abort = ptx::load_relaxed_system(&header->abort);
  begun.epoch = static_cast<std::uint32_t>(call);
  begun.longest_delay = team.settings->delay_nanoseconds;
  begun.all_live = team.settings->all_live != 0;
  if (!begun.all_live && team.settings->live[begun.heap.rank] == 0) return false;
  if (abort != 0) hear_of_fault(team, begun.heap.rank);
  ptx::add_relaxed_gpu(&team.counters[blockIdx.y].begun, 1);
  return abort == 0;
}
/// The last one of the rank's CTAs has done its part: the next launch begins to count anew. By one thread.
__device__ inline void end_joined(const DeviceTeam& team) {
  ptx::add_relaxed_gpu(&team.counters[blockIdx.y].begun, Word{0} - gridDim.x);
}

}  // namespace heddle
