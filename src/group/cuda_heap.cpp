#include <fmt/format.h>

#include <algorithm>

#include "group/cuda_heap.hpp"
#include "group/memory.hpp"
#include "signal/words.hpp"

namespace heddle::cuda {

DeviceMap spread_ranks(int ranks, std::vector<int> devices) {
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess) {
    cudaGetLastError();
    present = 0;
  }
  for (const int device : devices) {
    if (device < 0 || device >= present)
      throw InputError(fmt::format("GPU {} was asked for, this machine has {}", device, present));
  }
  if (devices.empty() || ranks < static_cast<int>(devices.size())) {
    throw InputError(fmt::format("{} ranks on {} GPUs: every GPU needs a rank", ranks, devices.size()));
  }
  DeviceMap map;
  const int gpus = static_cast<int>(devices.size());
  map.devices = std::move(devices);
  for (int gpu = 0; gpu < gpus; ++gpu) map.first_ranks.push_back(gpu * (ranks / gpus) + std::min(gpu, ranks % gpus));
  map.first_ranks.push_back(ranks);
  return map;
}

void check_peer_access(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      int possible = 1;
      if (from != to) check(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
      if (possible == 0)
        throw InputError(fmt::format("GPU {} cannot reach the memory of GPU {}; a group needs GPUs that are linked", from, to));
    }
  }
}

namespace {

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return prop;
}

}  // namespace

Heap::Heap(const DeviceMap& map, std::size_t bytes_a_rank) : map_(map) {
  check_peer_access(map.devices);
  std::size_t granularity = 1;
  for (const int device : map.devices) {
    const DeviceScope scope(device);
    check(cudaFree(nullptr), "creation of the CUDA context");
    const CUmemAllocationProp prop = properties(device);
    std::size_t own = 0;
    check(driver().granularity(&own, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "cuMemGetAllocationGranularity");
    granularity = std::max(granularity, own);
  }
  stride_ = align_up(std::max<std::size_t>(bytes_a_rank, 1), granularity);
  total_ = stride_ * static_cast<std::size_t>(map.ranks());
  check(driver().reserve(&base_, total_, granularity, 0, 0), "cuMemAddressReserve");
  for (std::size_t gpu = 0; gpu < map.devices.size(); ++gpu) {
    const std::size_t bytes = stride_ * static_cast<std::size_t>(map.ranks_on(gpu));
    const CUmemAllocationProp prop = properties(map.devices[gpu]);
    CUmemGenericAllocationHandle handle{};
    if (driver().create(&handle, bytes, &prop, 0) != CUDA_SUCCESS) {
      throw InputError(fmt::format("GPU {} has no memory for a heap of {} a rank, {} ranks", map.devices[gpu],
                                   describe_bytes(bytes_a_rank), map.ranks_on(gpu)));
    }
    parts_.push_back(handle);
    const CUdeviceptr address = base_ + stride_ * static_cast<std::size_t>(map.first_ranks[gpu]);
    check(driver().map(address, bytes, 0, handle, 0), "cuMemMap");
    mapped_.push_back(bytes);
    std::vector<CUmemAccessDesc> access;
    for (const int device : map.devices)
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    check(driver().set_access(address, bytes, access.data(), access.size()), "cuMemSetAccess");
    const DeviceScope scope(map.devices[gpu]);
    check(cudaMemset(reinterpret_cast<void*>(address), 0, bytes), "zeroing of the heap");
    check(cudaDeviceSynchronize(), "zeroing of the heap");
  }
}

Heap::~Heap() {
  for (std::size_t gpu = 0; gpu < mapped_.size(); ++gpu) {
    driver().unmap(base_ + stride_ * static_cast<std::size_t>(map_.first_ranks[gpu]), mapped_[gpu]);
  }
  for (const CUmemGenericAllocationHandle part : parts_) driver().release(part);
  if (base_ != 0) driver().free(base_, total_);
}

HeapView Heap::view(std::size_t gpu) const {
  return {reinterpret_cast<std::byte*>(base_), stride_, map_.first_ranks[gpu], map_.ranks()};
}

}  // namespace heddle::cuda
