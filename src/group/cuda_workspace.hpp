// The inside of a DeviceWorkspace, for the rooms that launch kernels over it.
#pragma once

#include <memory>
#include <vector>

#include "group/cuda_heap.hpp"
#include "heddle/device.hpp"
#include "signal/device_team.hpp"

namespace heddle {

struct DeviceWorkspace::Impl {
  Impl(const DeviceGroupOptions& options, std::size_t bytes_a_rank);
  ~Impl();

  /// What kernels of a GPU are given.
  /// `counters`: [ranks on the GPU] of the caller, zeroed now and at every reset.
  DeviceTeam team(std::size_t gpu, const std::shared_ptr<TeamCounters>& counters);
  void write_settings();

  cuda::DeviceMap map;
  std::size_t bytes;
  std::unique_ptr<cuda::Heap> heap;
  DeviceSettings settings;                 ///< the host's copy
  std::vector<DeviceSettings*> on_device;  ///< a GPU
  HostFault* faults = nullptr;             ///< [ranks], pinned and mapped
  std::vector<bool> live;
  struct Counters {
    std::size_t gpu;
    std::weak_ptr<TeamCounters> words;
  };
  std::vector<Counters> counters;

 private:
  void zero(const Counters& which) const;
  friend class DeviceWorkspace;
};

}  // namespace heddle
