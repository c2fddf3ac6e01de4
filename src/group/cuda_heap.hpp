// The symmetric heap on GPUs: one range of addresses in which rank r's part begins at r * stride,
// each part in the memory of its rank's GPU, readable and writable by all GPUs of the group.
#pragma once

#include <memory>
#include <vector>

#include "group/cuda_driver.hpp"
#include "heddle/group.hpp"

namespace heddle::cuda {

/// Which device each rank lives on: ranks of one device are consecutive.
struct DeviceMap {
  std::vector<int> devices;      ///< the GPUs of the group, in order
  std::vector<int> first_ranks;  ///< first rank of each GPU, and the number of ranks at the end
  int ranks() const { return first_ranks.back(); }
  int ranks_on(std::size_t gpu) const { return first_ranks[gpu + 1] - first_ranks[gpu]; }
};

/// `ranks` spread evenly over the devices, first devices take the remainder. Throws InputError where
/// there are fewer ranks than devices, or devices that do not exist.
DeviceMap spread_ranks(int ranks, std::vector<int> devices);

/// Throws InputError naming the pair of GPUs without peer access.
void check_peer_access(const std::vector<int>& devices);

/// A zeroed heap of one process over all its GPUs. Throws InputError with sizes if memory does not suffice.
class Heap {
 public:
  Heap(const DeviceMap& map, std::size_t bytes_a_rank);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// As ranks of GPU number `gpu` see it; .rank is that GPU's first rank.
  HeapView view(std::size_t gpu) const;
  std::size_t stride() const { return stride_; }

 private:
  DeviceMap map_;
  std::size_t stride_ = 0;
  std::size_t total_ = 0;
  CUdeviceptr base_ = 0;
  std::vector<CUmemGenericAllocationHandle> parts_;  ///< a GPU
  std::vector<std::size_t> mapped_;                  ///< bytes mapped of each part
};

}  // namespace heddle::cuda
