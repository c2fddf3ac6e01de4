// What stands for attention in front of a layer, where batches take turns at a GPU's SMs.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench_memory.hpp"
#include "bench_replay.hpp"

namespace heddle::tool {

/// A kernel of as much work as keeps all SMs of a GPU busy for so long: dependent multiply-adds in four CTAs an SM, one of which
/// fills an SM (launch_wide_work). Where SMs are taken by others it takes longer in proportion, and others wait for the SMs that it
/// has, as with a real kernel. Unlike one it leaves memory's bandwidth to others.
class AttentionStandIn {
 public:
  /// Finds how many steps last so long, and measures them alone. `give_up` as Lanes::settle's.
  AttentionStandIn(Lanes& lanes, int microseconds, const std::function<void()>& give_up);

  int microseconds() const { return microseconds_; }
  /// Of so many batches, one kernel.
  void queue(std::size_t gpu, int batches, cudaStream_t stream) const;
  /// docs/json.md, `attention` of `two_batches`.
  nlohmann::ordered_json json() const;

 private:
  std::vector<double> alone(std::uint64_t steps, const std::function<void()>& give_up);

  Lanes& lanes_;
  int microseconds_;
  std::uint64_t steps_ = 1;
  std::vector<std::unique_ptr<Block>> sinks_;  ///< a GPU
  std::vector<double> samples_;
};

}  // namespace heddle::tool
