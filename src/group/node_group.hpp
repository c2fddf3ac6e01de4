// A group over nodes: a group of this node's ranks, and messages to the ranks that have this one's place on the other nodes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "group/host_group.hpp"
#include "heddle/nodes.hpp"

namespace heddle {

class NodeGroup final : public Group {
 public:
  /// `inside` is of this node's ranks alone.
  NodeGroup(std::unique_ptr<HostGroup> inside, std::shared_ptr<NodeLink> link, int node, int nodes);

  int rank() const override { return node_ * inside_->ranks() + inside_->rank(); }
  int ranks() const override { return nodes_ * inside_->ranks(); }
  int nodes() const override { return nodes_; }
  NodeLink* link() const override { return link_.get(); }
  std::chrono::nanoseconds deadline() const override { return inside_->deadline(); }
  void set_deadline(std::chrono::nanoseconds deadline) override { inside_->set_deadline(deadline); }
  void barrier(const std::string& what) override;
  std::vector<std::string> exchange(const std::string& mine, const std::string& what) override;
  HeapMapping create_heap(std::size_t bytes) override;
  void release_heap(const HeapMapping& heap) override;
  void reset(const std::vector<bool>& live) override;
  const std::vector<bool>& live() const override { return live_; }

 private:
  /// Every node's message of this place, this one's own included. Within the deadline, or FaultError naming rank and node.
  std::vector<NodeMessage> meet(const NodeMessage& mine, const std::string& what);

  std::unique_ptr<HostGroup> inside_;
  std::shared_ptr<NodeLink> link_;
  int node_;
  int nodes_;
  std::vector<bool> live_;
};

}  // namespace heddle
