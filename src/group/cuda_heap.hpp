// The symmetric heap on GPUs: one range of addresses in which rank r's part begins at r * stride, each part in the memory
// of its rank's GPU, readable and writable by all GPUs of the group. Every process has a range of its own over the same
// memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "group/cuda_driver.hpp"
#include "group/cuda_map.hpp"
#include "heddle/group.hpp"

namespace heddle::cuda {

/// Reserved addresses and what is mapped into them; unmapped and given back at the end.
class AddressRange {
 public:
  /// Throws InputError where there are not as many addresses.
  AddressRange(std::size_t bytes, std::size_t granularity);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  CUdeviceptr base() const { return base_; }
  /// Maps `bytes` of an allocation at base + offset.
  void map(std::size_t offset, std::size_t bytes, CUmemGenericAllocationHandle handle);

 private:
  struct Piece {
    CUdeviceptr address;
    std::size_t bytes;
  };
  CUdeviceptr base_ = 0;
  std::size_t bytes_;
  std::vector<Piece> pieces_;
};

class Heap {
 public:
  /// Collective: a heap that has been tested by traffic between all its GPUs and zeroed since. Throws InputError, on all
  /// processes alike, with sizes if memory does not suffice, with the pair of GPUs that cannot reach each other.
  Heap(Group& processes, const DeviceMap& map, std::size_t bytes_a_rank);

  /// As ranks of this process's GPU number `gpu` see it; .rank is that GPU's first rank.
  HeapView view(std::size_t gpu) const;
  std::size_t stride() const { return stride_; }

 private:
  void map_parts(Group& processes);
  /// Headers in the place of other nodes' parts, which whoever gives up writes and nobody reads.
  void map_other_nodes(std::size_t granularity);
  void allow_access(std::size_t offset, std::size_t bytes, const std::string& whose);
  void zero_own_parts();

  const DeviceMap& map_;
  std::size_t stride_ = 0;
  std::unique_ptr<AddressRange> range_;
};

}  // namespace heddle::cuda
