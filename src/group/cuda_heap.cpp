#include "group/cuda_heap.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "group/agreement.hpp"
#include "group/cuda_peers.hpp"
#include "group/cuda_probe.hpp"
#include "group/memory.hpp"
#include "signal/words.hpp"

namespace heddle::cuda {

namespace {

/// Of this process's GPUs; their contexts exist afterwards.
std::size_t own_granularity(const DeviceMap& map) {
  std::size_t granularity = 1;
  for (std::size_t gpu = 0; gpu < map.gpus; ++gpu) {
    const DeviceScope scope(map.own(gpu).device);
    check(cudaFree(nullptr), "creation of the CUDA context");
    const CUmemAllocationProp prop = memory_properties(map.own(gpu).device);
    std::size_t wanted = 0;
    check(driver().granularity(&wanted, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "cuMemGetAllocationGranularity");
    granularity = std::max(granularity, wanted);
  }
  return granularity;
}

std::size_t largest(Group& processes, std::size_t mine, const std::string& what) {
  std::size_t most = mine;
  for (const std::string& text : processes.exchange(fmt::format("{}", mine), what)) {
    if (!text.empty()) most = std::max<std::size_t>(most, std::stoull(text));
  }
  return most;
}

}  // namespace

AddressRange::AddressRange(std::size_t bytes, std::size_t granularity) : bytes_(bytes) {
  const CUresult status = driver().reserve(&base_, bytes, granularity, 0, 0);
  if (status == CUDA_SUCCESS) return;
  throw InputError(fmt::format("no addresses for a heap of {} over all ranks (CUDA driver error {})", describe_bytes(bytes),
                               static_cast<int>(status)));
}

AddressRange::~AddressRange() {
  for (const Piece& piece : pieces_) driver().unmap(piece.address, piece.bytes);
  driver().free(base_, bytes_);
}

void AddressRange::map(std::size_t offset, std::size_t bytes, CUmemGenericAllocationHandle handle) {
  check(driver().map(base_ + offset, bytes, 0, handle, 0), "cuMemMap");
  pieces_.push_back({base_ + offset, bytes});
}

Heap::Heap(Group& processes, const DeviceMap& map, std::size_t bytes_a_rank) : map_(map) {
  std::size_t granularity = 1;
  step_together(processes, "look at the GPUs", [&] {
    granularity = own_granularity(map);
    check_peer_access(map);
  });
  granularity = largest(processes, granularity, "granularity of device memory");
  stride_ = align_up(std::max<std::size_t>(bytes_a_rank, 1), granularity);
  step_together(processes, "reservation of the device heap",
                [&] { range_ = std::make_unique<AddressRange>(stride_ * static_cast<std::size_t>(map.ranks()), granularity); });
  map_parts(processes);
  if (map.nodes > 1) step_together(processes, "headers of other nodes", [&] { map_other_nodes(granularity); });
  probe_heap(processes, map, view(0));
  step_together(processes, "zeroing of the device heap", [&] { zero_own_parts(); });
}

// The allocations are let go of at once: what is mapped stays.
void Heap::map_parts(Group& processes) {
  const std::vector<Allocation> allocations = allocate_parts(processes, map_, stride_);
  step_together(processes, "mapping of the device heap", [&] {
    for (std::size_t part = 0; part < map_.parts.size(); ++part) {
      const std::size_t offset = stride_ * static_cast<std::size_t>(map_.parts[part].first_rank);
      const std::size_t bytes = stride_ * static_cast<std::size_t>(map_.parts[part].ranks);
      range_->map(offset, bytes, allocations[part].handle());
      allow_access(offset, bytes, map_.name_of(part));
    }
  });
}

void Heap::allow_access(std::size_t offset, std::size_t bytes, const std::string& whose) {
  for (std::size_t gpu = 0; gpu < map_.gpus; ++gpu) {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, map_.own(gpu).device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const CUresult status = driver().set_access(range_->base() + offset, bytes, &access, 1);
    if (status == CUDA_SUCCESS) continue;
    throw InputError(fmt::format("{} cannot map the memory of {} (CUDA driver error {}); a group needs GPUs that are linked",
                                 map_.name_of(map_.first + gpu), whose, static_cast<int>(status)));
  }
}

void Heap::map_other_nodes(std::size_t granularity) {
  const CUmemAllocationProp prop = memory_properties(map_.own(0).device);
  CUmemGenericAllocationHandle handle{};
  check(driver().create(&handle, granularity, &prop, 0), "memory for the headers of other nodes");
  const Allocation one(handle);
  const int first = map_.parts.front().first_rank;
  for (int rank = 0; rank < map_.ranks(); ++rank) {
    if (rank >= first && rank < first + map_.ranks_a_node()) continue;
    const std::size_t offset = stride_ * static_cast<std::size_t>(rank);
    range_->map(offset, granularity, one.handle());
    allow_access(offset, granularity, map_.name_of(map_.first));
  }
}

void Heap::zero_own_parts() {
  for (std::size_t gpu = 0; gpu < map_.gpus; ++gpu) {
    const DeviceScope scope(map_.own(gpu).device);
    const HeapView own = view(gpu);
    const std::size_t bytes = stride_ * static_cast<std::size_t>(map_.own(gpu).ranks);
    check(cudaMemset(own.mine<std::byte>(0), 0, bytes), "zeroing of the heap");
    check(cudaDeviceSynchronize(), "zeroing of the heap");
  }
}

HeapView Heap::view(std::size_t gpu) const {
  return {reinterpret_cast<std::byte*>(range_->base()), stride_, map_.own(gpu).first_rank, map_.ranks()};
}

}  // namespace heddle::cuda
