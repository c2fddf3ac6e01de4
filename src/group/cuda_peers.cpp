#include "group/cuda_peers.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "group/agreement.hpp"
#include "group/descriptor_exchange.hpp"
#include "group/memory.hpp"

namespace heddle::cuda {

namespace {

/// Which device of this process has that identity; -1 where it sees none.
int device_here(const DeviceMap& map, std::size_t part, const std::vector<std::string>& uuids) {
  if (map.owns(part)) return map.parts[part].device;
  const auto found = std::find(uuids.begin(), uuids.end(), map.parts[part].uuid);
  return found == uuids.end() ? -1 : static_cast<int>(found - uuids.begin());
}

Allocation create(const DeviceMap& map, std::size_t part, std::size_t stride) {
  const Part& own = map.parts[part];
  const std::size_t bytes = stride * static_cast<std::size_t>(own.ranks);
  const CUmemAllocationProp prop = memory_properties(own.device);
  CUmemGenericAllocationHandle handle{};
  if (driver().create(&handle, bytes, &prop, 0) != CUDA_SUCCESS) {
    throw InputError(
        fmt::format("{} has no memory for a heap of {} a rank, {} ranks", map.name_of(part), describe_bytes(stride), own.ranks));
  }
  return Allocation(handle);
}

Descriptor export_part(const Allocation& allocation) {
  int number = -1;
  check(driver().export_handle(&number, allocation.handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  return Descriptor(number);
}

Allocation import_part(const DeviceMap& map, std::size_t part, const Descriptor& descriptor) {
  CUmemGenericAllocationHandle handle{};
  void* number = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor.number()));
  const CUresult status = driver().import_handle(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (status != CUDA_SUCCESS) {
    throw InputError(fmt::format("process {} cannot import the memory of {} (CUDA driver error {})", map.process, map.name_of(part),
                                 static_cast<int>(status)));
  }
  return Allocation(handle);
}

}  // namespace

Allocation::~Allocation() {
  if (held_) driver().release(handle_);
}

CUmemAllocationProp memory_properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

void check_peer_access(const DeviceMap& map) {
  int present = 0;
  check(cudaGetDeviceCount(&present), "cudaGetDeviceCount");
  std::vector<std::string> uuids;
  for (int device = 0; device < present; ++device) uuids.push_back(uuid_of(device));
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    for (std::size_t part = 0; part < map.parts.size(); ++part) {
      const int from = map.own(gpu).device;
      const int to = device_here(map, part, uuids);
      int possible = 1;
      if (to >= 0 && to != from) check(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
      if (possible == 0) {
        throw InputError(fmt::format("{} cannot reach the memory of {}; a group needs GPUs that are linked",
                                     map.name_of(map.first + gpu), map.name_of(part)));
      }
    }
  }
}

std::vector<Allocation> allocate_parts(Group& processes, const DeviceMap& map, std::size_t stride) {
  std::vector<Allocation> own;
  std::vector<Descriptor> exported;
  step_together(processes, "allocation of the device heap", [&] {
    for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
      own.push_back(create(map, map.first + gpu, stride));
      if (map.gpus < map.parts.size()) exported.push_back(export_part(own.back()));
    }
  });
  if (map.gpus == map.parts.size()) return own;
  std::vector<int> numbers;
  for (const Descriptor& descriptor : exported) numbers.push_back(descriptor.number());
  const auto taken = exchange_descriptors(processes, numbers, "passing of device memory between processes");
  std::vector<Allocation> all;
  step_together(processes, "import of device memory", [&] {
    int process = -1;
    std::size_t next = 0;
    for (std::size_t part = 0; part < map.parts.size(); ++part) {
      next = map.parts[part].process == process ? next + 1 : 0;
      process = map.parts[part].process;
      if (map.owns(part)) {
        all.push_back(std::move(own[next]));
      } else {
        all.push_back(import_part(map, part, taken[static_cast<std::size_t>(process)][next]));
      }
    }
  });
  return all;
}

}  // namespace heddle::cuda
