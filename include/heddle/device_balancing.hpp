// Copies of experts on GPUs: which copy each pair takes, chosen by a kernel that can be captured. Built with HEDDLE_CUDA only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "heddle/balancing.hpp"
#include "heddle/device.hpp"

namespace heddle {

/// For the ranks that live on one GPU. A layer or exchange of physical experts (ReplicaMap::placement) takes what choose() returns:
///
///   layer.forward(copies.choose(inputs, stream), step, outputs, stream);
///
/// Captured calls follow later updates: placements change between replays of a graph.
class DeviceCopies {
 public:
  /// Ranks [first_rank, first_rank + local_ranks) on CUDA's `device`, at most `cap` tokens each in a call, all passes of it
  /// together. One source: all tokens are source 0's (tensor-parallel attention, where every rank brings all). Takes all memory.
  /// Throws InputError for more than 512 experts, 1,024 copies or 256 ranks.
  DeviceCopies(int device, int first_rank, int local_ranks, const ReplicaMap& map, CopyRule rule, int topk, int cap,
               bool one_source = false);
  ~DeviceCopies();
  DeviceCopies(DeviceCopies&&) noexcept;
  DeviceCopies& operator=(DeviceCopies&&) noexcept;

  /// Queues a kernel a rank. The inputs with physical ids in memory of this object, the next call's too. The choices are those of
  /// choose_copies. An id that is none, or that repeats within a token, becomes one that the dispatch refuses, naming
  /// map().physical().
  std::vector<DeviceInput> choose(std::span<const DeviceInput> inputs, DeviceStream stream);
  /// Another placement of the same sizes (InputError), for calls behind this one on the stream, captured ones too. All GPUs change
  /// between the same calls, with their experts' weights (DeviceLayer::update_expert). Not in graph capture; waits for the stream.
  void update(const ReplicaMap& map, DeviceStream stream);
  const ReplicaMap& map() const;
  /// Pairs of each logical expert that this GPU's ranks brought since the last such call, and sets them to 0. Waits for the stream.
  std::vector<std::int64_t> take_counts(DeviceStream stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace heddle
