// The memory of a group's GPUs as this process gets at it: its own allocations, and those of other processes, which
// arrive as file descriptors.
#pragma once

#include <vector>

#include "group/cuda_driver.hpp"
#include "group/cuda_map.hpp"

namespace heddle::cuda {

/// A piece of GPU memory, of this process or imported; let go of when nobody holds or maps it any more.
class Allocation {
 public:
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  ~Allocation();
  Allocation(Allocation&& other) noexcept : handle_(other.handle_), held_(std::exchange(other.held_, false)) {}
  Allocation& operator=(Allocation&&) = delete;
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_;
  bool held_ = true;
};

/// Memory of a device that can be handed to other processes.
CUmemAllocationProp memory_properties(int device);

/// Throws InputError naming the pair where a GPU of this process cannot reach one that this process sees. Of GPUs
/// that it does not see only the test of the heap can tell (cuda_probe.hpp).
void check_peer_access(const DeviceMap& map);

/// Collective: memory of `stride` bytes a rank for every part of the group, in the order of the parts. Throws InputError,
/// on all processes alike, where memory does not suffice or cannot be imported; FaultError where a process is missing.
std::vector<Allocation> allocate_parts(Group& processes, const DeviceMap& map, std::size_t stride);

}  // namespace heddle::cuda
