// The inside of a DeviceWorkspace, for the rooms that launch kernels over it.
#pragma once

#include <memory>
#include <vector>

#include "group/cuda_heap.hpp"
#include "group/cuda_pinned.hpp"
#include "heddle/device.hpp"
#include "signal/device_team.hpp"

namespace heddle {

/// What the workspace has on one of its GPUs beside the heap.
struct OwnGpu {
  DeviceSettings* settings = nullptr;
  /// Beside the streams of exchanges: what the workspace copies and launches by itself waits for none of their kernels.
  cudaStream_t stream = nullptr;
};

struct DeviceWorkspace::Impl {
  /// `alone`: the group of one that a workspace of a single process makes for itself, or null.
  Impl(std::unique_ptr<Group> alone, Group& processes, const DeviceGroupOptions& mine, std::size_t bytes_a_rank);
  ~Impl();

  /// What kernels of a GPU are given.
  /// `counters`: [ranks on the GPU] of the caller, zeroed now and at every reset.
  DeviceTeam team(std::size_t gpu, const std::shared_ptr<TeamCounters>& counters);
  /// Memory of a GPU, zeroed now and at every reset for as long as it is there.
  void keep_zeroed(std::size_t gpu, const std::shared_ptr<void>& memory, std::size_t memory_bytes);
  void write_settings();
  /// Gives up in the name of an own rank, so that no rank waits for it; like a kernel's own fault. Waits for a small
  /// kernel on that rank's GPU, which needs room there.
  void give_up(int rank, const FaultRecord& record);
  /// Which own GPU a rank lives on; throws InputError for ranks of other processes.
  std::size_t gpu_of(int rank) const;

  std::unique_ptr<Group> alone;
  Group& processes;
  DeviceNodes nodes;
  cuda::DeviceMap map;
  std::size_t bytes;
  std::unique_ptr<cuda::Heap> heap;
  DeviceSettings settings;              ///< the host's copy
  std::vector<OwnGpu> own;              ///< a GPU
  cuda::PinnedArray<HostFault> faults;  ///< [ranks]; of own ranks
  std::vector<bool> live;
  struct Zeroed {
    std::size_t gpu;
    std::weak_ptr<void> memory;
    std::size_t bytes;
  };
  std::vector<Zeroed> zeroed;

 private:
  void make_board();
  void zero(const Zeroed& which) const;
  void settle() const;
  Word agree_on_epoch();
  std::vector<bool> live_processes() const;
  friend class DeviceWorkspace;
};

}  // namespace heddle
