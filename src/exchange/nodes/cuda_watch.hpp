// Whoever waits for other nodes on a GPU has no deadline of its own: a thread of the host looks how far ranks are.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "exchange/nodes/cuda_call.hpp"
#include "heddle/device_nodes.hpp"

namespace heddle {

/// A rank of this process, and where the head of each peer's batch and of its results arrives, in device memory.
struct WatchedRank {
  struct Peer {
    int rank = 0;
    int node = 0;
    const BatchHead* batch = nullptr;
    const BatchHead* results = nullptr;
  };
  int rank = 0;
  NodeProgress* progress = nullptr;
  std::vector<Peer> peers;
};

/// Where a rank's swap takes longer than the workspace's deadline, gives up in its name, naming the first peer whose head has not
/// come, and aborts the link. Of one exchange on one GPU.
class NodeWatch {
 public:
  NodeWatch(DeviceWorkspace& workspace, std::size_t gpu, std::vector<WatchedRank> ranks);
  ~NodeWatch();
  NodeWatch(const NodeWatch&) = delete;
  NodeWatch& operator=(const NodeWatch&) = delete;

 private:
  void look_on() noexcept;
  /// The first rank that has waited too long, or null.
  const WatchedRank* overdue();
  void give_up(const WatchedRank& of);
  BatchHead read(const BatchHead* head) const;

  struct Seen {
    Word begun = 0;
    std::chrono::steady_clock::time_point since{};
  };
  DeviceWorkspace& workspace_;
  int device_;
  std::vector<WatchedRank> ranks_;
  std::vector<Seen> seen_;
  cudaStream_t stream_ = nullptr;
  std::mutex mutex_;
  std::condition_variable end_;
  bool over_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace heddle
