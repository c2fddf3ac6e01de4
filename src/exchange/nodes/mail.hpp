// One rank's messages to and from other nodes within a call: headers, waits that end, and faults told across nodes.
#pragma once

#include "exchange/nodes/layout.hpp"
#include "heddle/nodes.hpp"
#include "signal/host_worker.hpp"

namespace heddle {

/// Ends what other nodes do in the present call: tells one rank of each, which tells its own node. Errors of the link are left
/// alone: who is not told finds out by its deadline.
void tell_nodes(NodeLink& link, const std::vector<bool>& live, int ranks_a_node, int rank, const FaultRecord& record) noexcept;

class NodeMail {
 public:
  /// `live` [ranks]
  NodeMail(NodeLink& link, const NodesLayout& layout, const HeapView& heap, const std::vector<bool>& live)
      : link_(link), layout_(layout), heap_(heap), live_(live) {}

  /// Fills a message's header in: the call's epoch, and how many rows or results there are.
  static void head(NodeMessage& message, std::uint32_t epoch, std::uint32_t rows);
  static std::uint32_t rows_of(const NodeMessage& message);

  void post(int peer, NodeTag tag, NodeMessage message) { link_.post(peer, tag, std::move(message)); }
  /// The next message of a peer, of this call; by one worker. False after the abort word has been raised: here, because the
  /// deadline passed or the message is of another call (the fault names peer and node), or elsewhere.
  bool take(HostWorker& w, int peer, NodeTag tag, std::chrono::nanoseconds deadline, NodeMessage& message);
  /// Waits until all that was posted has left, likewise. `last`: a peer to name.
  bool drain(HostWorker& w, NodeTag tag, int last, std::chrono::nanoseconds deadline);
  /// After a fault: tells the other nodes, if it began on this rank.
  void tell_fault() noexcept;

 private:
  bool someone_gave_up(HostWorker& w);
  WordName name_of(int peer, NodeTag tag) const;

  NodeLink& link_;
  const NodesLayout& layout_;
  HeapView heap_;
  const std::vector<bool>& live_;
};

}  // namespace heddle
