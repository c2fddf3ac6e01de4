// Messages between the virtual nodes of one process: queues in ordinary memory.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "heddle/nodes.hpp"

namespace heddle {

/// The queues of all ranks.
class MemoryPost {
 public:
  void put(int from, int to, int tag, NodeMessage message);
  std::optional<NodeMessage> get(int from, int to, int tag);
  std::optional<NodeMessage> get_any(int to, int tag);
  /// Tests only: nothing from or to these ranks arrives any more.
  void cut(int first, int ranks);

 private:
  struct Key {
    int to, tag, from;
    auto operator<=>(const Key&) const = default;
  };
  bool is_cut(int rank) const { return rank >= cut_first_ && rank < cut_first_ + cut_ranks_; }

  std::mutex mutex_;
  std::map<Key, std::deque<NodeMessage>> queues_;
  int cut_first_ = 0;
  int cut_ranks_ = 0;
};

class MemoryLink final : public NodeLink {
 public:
  MemoryLink(std::shared_ptr<MemoryPost> post, int rank) : post_(std::move(post)), rank_(rank) {}
  std::size_t most_bytes() const override { return std::size_t{1} << 40; }
  void post(int peer, int tag, NodeMessage message) override { post_->put(rank_, peer, tag, std::move(message)); }
  std::optional<NodeMessage> take(int peer, int tag) override { return post_->get(peer, rank_, tag); }
  std::optional<NodeMessage> take_any(int tag) override { return post_->get_any(rank_, tag); }
  bool idle() override { return true; }
  MemoryPost& queues() const { return *post_; }

 private:
  std::shared_ptr<MemoryPost> post_;
  int rank_;
};

/// A link a rank.
std::vector<std::shared_ptr<MemoryLink>> create_memory_links(int ranks);

}  // namespace heddle
