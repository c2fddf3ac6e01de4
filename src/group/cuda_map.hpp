// Which GPU each rank of a group lives on, over all its processes.
#pragma once

#include <string>
#include <vector>

#include "heddle/device.hpp"
#include "heddle/group.hpp"

namespace heddle::cuda {

/// A GPU with the ranks on it, which are consecutive.
struct Part {
  int process = 0;   ///< member of the host group
  int device = 0;    ///< as that process numbers its GPUs
  std::string uuid;  ///< the same wherever the GPU is seen
  int first_rank = 0;
  int ranks = 0;
  std::string model = {};  ///< as the driver calls it, e.g. "NVIDIA H200"
};

/// All GPUs of a group in the order of their ranks: by process, then as each process named its GPUs. Where the group is a node of
/// several these are the node's own, and ranks are numbered node after node.
struct DeviceMap {
  std::vector<Part> parts;
  int process = 0;        ///< this one
  std::size_t first = 0;  ///< first of this process's parts
  std::size_t gpus = 0;   ///< this process's parts
  int nodes = 1;

  int ranks_a_node() const { return parts.back().first_rank + parts.back().ranks - parts.front().first_rank; }
  int ranks() const { return nodes * ranks_a_node(); }
  const Part& own(std::size_t gpu) const { return parts[first + gpu]; }
  bool owns(std::size_t part) const { return part >= first && part < first + gpus; }
  /// The model of its GPUs; of several models all, each once: the same text on all processes.
  std::string model() const;
  /// "GPU 1", or where there are several processes "GPU 0 of process 1 (GPU-6a...)".
  std::string name_of(std::size_t part) const;
};

/// A device's identity, "GPU-..." as tools print it.
std::string uuid_of(int device);
std::string model_of(int device);

/// Collective: this process's `mine.ranks` ranks spread evenly over its GPUs, the first ones taking the remainder, behind
/// the ranks of the processes before it. Throws InputError, on all processes alike, where there are fewer ranks than GPUs,
/// GPUs that do not exist or were named twice, a node that is not there, or more ranks than a group can have.
DeviceMap map_ranks(Group& processes, const DeviceGroupOptions& mine);

}  // namespace heddle::cuda
