// A group over nodes: a group of this node's ranks, and messages to the ranks that have this one's place on the other nodes. Under
// recovery nodes, and ranks of them, may be lost: each era has its live ranks, and messages of its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/driving_store.hpp"
#include "group/era_link.hpp"
#include "group/host_group.hpp"
#include "heddle/nodes.hpp"

namespace heddle {

class NodeGroup final : public Group {
 public:
  /// `inside` is of this node's ranks alone. `store`: words of all nodes' ranks; null where there are none.
  NodeGroup(std::unique_ptr<HostGroup> inside, std::shared_ptr<NodeLink> link, int node, int nodes, std::shared_ptr<Store> store);

  int rank() const override { return node_ * inside_->ranks() + inside_->rank(); }
  int ranks() const override { return nodes_ * inside_->ranks(); }
  int nodes() const override { return nodes_; }
  NodeLink* link() const override { return &link_; }
  std::chrono::nanoseconds deadline() const override { return inside_->deadline(); }
  void set_deadline(std::chrono::nanoseconds deadline) override { inside_->set_deadline(deadline); }
  void barrier(const std::string& what) override;
  std::vector<std::string> exchange(const std::string& mine, const std::string& what) override;
  HeapMapping create_heap(std::size_t bytes) override;
  void release_heap(const HeapMapping& heap) override;
  void abandon_heap(const HeapMapping& heap) override { inside_->abandon_heap(heap); }
  void reset(const std::vector<bool>& live) override;
  void begin_era(std::uint32_t era, const std::vector<bool>& live) override;
  const std::vector<bool>& live() const override { return live_; }
  Store& store() override;
  void answer_door() override { inside_->answer_door(); }

 private:
  /// Messages by node, this one's included; none of a node that is lost, or was not heard within the deadline.
  using Heard = std::vector<std::optional<NodeMessage>>;
  /// Tells all other nodes, and hears them.
  Heard hear_nodes(const NodeMessage& mine);
  /// The first node that has live ranks and was not heard.
  std::optional<int> first_missing(const Heard& heard) const;
  /// The same; FaultError where a node is missing, with its number and the rank that should have spoken.
  Heard meet(const NodeMessage& mine, const std::string& what);
  std::optional<int> speaker(int node) const;
  void note_unheard(std::uint32_t era, const Heard& heard);

  std::unique_ptr<HostGroup> inside_;
  mutable EraLink link_;
  int node_;
  int nodes_;
  std::optional<DrivingStore> store_;
  std::vector<bool> live_;
};

}  // namespace heddle
