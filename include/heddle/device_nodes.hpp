// GPUs of several nodes (docs/nodes.md, "On GPUs"). Each node has a DeviceWorkspace of its own, whose DeviceGroupOptions::nodes
// says which node it is; way elastic then works over all of them, in either NodeMode. Between nodes bytes go over a DeviceNodeLink.
// Built with HEDDLE_CUDA only.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "heddle/device.hpp"

namespace heddle {

/// Two ranks of different nodes give each other as many bytes.
struct DeviceSwap {
  int rank = 0;                ///< of this process
  int peer = 0;                ///< of another node
  const void* from = nullptr;  ///< device memory, 16-byte aligned, as `to`
  void* to = nullptr;
  std::size_t bytes = 0;  ///< a multiple of 16
};

/// Leads from the ranks of one process to those of other nodes. No call waits.
class DeviceNodeLink {
 public:
  virtual ~DeviceNodeLink() = default;
  /// Ranks of all nodes.
  virtual int ranks() const = 0;
  /// Queues swaps on a stream of the ranks' GPU, the current device; all go at once. Behind them on the stream every `to` is
  /// filled, and every `from` may be written anew. Both ranks of a pair make the same calls with the same sizes in the same order.
  /// May be captured in a graph. Throws Error of kind fault where the link was aborted or says that a rank is gone.
  virtual void swap(std::span<const DeviceSwap> swaps, DeviceStream stream) = 0;
  /// Swaps that are under way on this process's GPUs end, best effort, with whatever has come; later ones throw. From any thread.
  virtual void abort() noexcept = 0;
};

/// Links of `nodes` nodes whose ranks, `ranks_a_node` each, share one GPU of this process, to learn, test and debug: a small kernel
/// copies what the peer offers and waits for it meanwhile, so exchanges of all nodes must find room beside it: each has a share of
/// the SMs (DeviceExchangeOptions::sms). Throws InputError.
std::vector<std::shared_ptr<DeviceNodeLink>> create_virtual_device_links(int nodes, int ranks_a_node, int device = 0);

/// NCCL's sends and receives; rank r of the group is rank r of the communicators. Collective over their processes: connects every
/// rank with every other one. Throws InputError where this NCCL (2.7 or newer is needed) or this build has none, Error where NCCL
/// fails.
std::shared_ptr<DeviceNodeLink> create_nccl_link(std::shared_ptr<NcclCommunicators> communicators);

}  // namespace heddle
