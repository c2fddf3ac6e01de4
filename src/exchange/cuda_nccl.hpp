// NCCL, found at run time: communicators of one process or of several, a GPU a rank, and the two collectives that gather needs.
// Nothing of nccl.h shows here, so that a build without it only has to say no.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "group/cuda_map.hpp"
#include "heddle/device_nodes.hpp"

namespace heddle {

/// "GPU number g" is the g-th of this process's GPUs.
struct NcclCommunicators::Impl {
  virtual ~Impl() = default;

  /// Calls of several GPUs that one thread makes and that may have to meet: NCCL takes them up together at the end.
  virtual void grouped(const std::function<void()>& calls) = 0;
  /// to: [ranks, bytes], from every rank's `from`.
  virtual void all_gather(std::size_t gpu, const void* from, void* to, std::size_t bytes, cudaStream_t stream) = 0;
  /// to: [values], the sum over ranks of their from[rank * values ...], a rounding to bf16 at every hop.
  virtual void reduce_scatter(std::size_t gpu, const bf16* from, bf16* to, std::size_t values, cudaStream_t stream) = 0;

  /// Connects every rank with every other one for swaps, together on all processes; a call of one GPU waits for no other then.
  /// Throws InputError where this NCCL has no sends and receives.
  virtual void connect_pairs() = 0;
  /// Sends and receives of one rank, all at once.
  virtual void swap(std::span<const DeviceSwap> swaps, cudaStream_t stream) = 0;

  virtual void throw_if_failed() const = 0;
  virtual void abort() = 0;

  /// Memory of `bytes` on every own GPU, freed with the pointer. symmetric: by NCCL, and registered with all communicators as
  /// one window, so that kernels reach into it directly; throws InputError where this NCCL has no such thing.
  virtual std::shared_ptr<std::vector<void*>> allocate(std::size_t bytes, bool symmetric) = 0;

  cuda::DeviceMap map;  ///< where the ranks are, one a GPU
  int version = 0;
};

/// What processes settle before they make communicators together.
struct NcclMeeting {
  cuda::DeviceMap map;
  std::string id;  ///< bytes of an ncclUniqueId, by which ranks find each other
};
/// Collective over the live members of `processes`. Throws on all alike: InputError where one has no NCCL or another one, or where
/// ranks share a GPU; FaultError naming a process that does not come.
NcclMeeting meet_for_nccl(Group& processes, const std::vector<int>& devices);

}  // namespace heddle
