#include "group/node_group.hpp"

#include <fmt/format.h>

#include <cstring>

#include "group/agreement.hpp"
#include "group/memory_link.hpp"
#include "group/node_wait.hpp"

namespace heddle {

namespace {

/// Texts one after the other, each behind its length.
NodeMessage packed(const std::vector<std::string>& texts) {
  NodeMessage message;
  for (const std::string& text : texts) {
    const std::uint64_t size = text.size();
    const std::size_t at = message.size();
    message.resize(at + sizeof size + text.size());
    std::memcpy(message.data() + at, &size, sizeof size);
    std::memcpy(message.data() + at + sizeof size, text.data(), text.size());
  }
  return message;
}

std::vector<std::string> unpacked(const NodeMessage& message) {
  std::vector<std::string> texts;
  std::uint64_t size = 0;
  for (std::size_t at = 0; at + sizeof size <= message.size();) {
    std::memcpy(&size, message.data() + at, sizeof size);
    at += sizeof size;
    const std::size_t here = std::min<std::size_t>(size, message.size() - at);
    texts.emplace_back(reinterpret_cast<const char*>(message.data() + at), here);
    at += here;
  }
  return texts;
}

}  // namespace

NodeGroup::NodeGroup(std::unique_ptr<HostGroup> inside, std::shared_ptr<NodeLink> link, int node, int nodes)
    : inside_(std::move(inside)),
      link_(std::move(link)),
      node_(node),
      nodes_(nodes),
      live_(static_cast<std::size_t>(ranks()), true) {
  check_group_size(rank(), ranks());
}

// Whoever is heard from has met all ranks of its own node before it spoke.
std::vector<NodeMessage> NodeGroup::meet(const NodeMessage& mine, const std::string& what) {
  const auto rank_on = [&](int node) { return node * inside_->ranks() + inside_->rank(); };
  for (int node = 0; node < nodes_; ++node) {
    if (node != node_) link_->post(rank_on(node), node_meeting, mine);
  }
  const auto end = std::chrono::steady_clock::now() + deadline();
  std::vector<NodeMessage> all(static_cast<std::size_t>(nodes_));
  all[static_cast<std::size_t>(node_)] = mine;
  PollPause pause;
  std::uint64_t heard = 0;
  for (int node = 0; node < nodes_;) {
    auto message = node == node_ ? std::optional<NodeMessage>(mine) : link_->take(rank_on(node), node_meeting);
    if (message) {
      all[static_cast<std::size_t>(node++)] = std::move(*message);
      ++heard;
      continue;
    }
    if (std::chrono::steady_clock::now() >= end)
      throw FaultError(
          {rank(), rank_on(node), what, fmt::format("message of node {}", node), static_cast<std::uint64_t>(nodes_), heard});
    pause.rest();
  }
  while (!link_->idle() && std::chrono::steady_clock::now() < end) pause.rest();
  return all;
}

void NodeGroup::barrier(const std::string& what) {
  inside_->barrier(what);
  meet({}, what);
}

std::vector<std::string> NodeGroup::exchange(const std::string& mine, const std::string& what) {
  std::vector<std::string> all;
  for (const NodeMessage& message : meet(packed(inside_->exchange(mine, what)), what)) {
    for (std::string& text : unpacked(message)) all.push_back(std::move(text));
  }
  if (all.size() != static_cast<std::size_t>(ranks()))
    throw Error(ErrorKind::fault, fmt::format("{}: {} texts came for {} ranks; do all nodes have {} ranks?", what, all.size(),
                                              ranks(), inside_->ranks()));
  return all;
}

HeapMapping NodeGroup::create_heap(std::size_t bytes) {
  HeapMapping heap;
  step_together(*this, "heap creation", [&] { heap = inside_->create_part_of_heap(bytes, node_ * inside_->ranks(), ranks()); });
  return heap;
}

void NodeGroup::release_heap(const HeapMapping& heap) {
  barrier("heap release");
  inside_->release_heap(heap);
}

void NodeGroup::reset(const std::vector<bool>&) {
  throw InputError("a group over several nodes cannot go on after a fault; start it again with the nodes that are left");
}

namespace {
void check_nodes(int nodes, int ranks_a_node) {
  if (nodes < 1 || ranks_a_node < 1)
    throw InputError(fmt::format("{} nodes of {} ranks: at least one of each is wanted", nodes, ranks_a_node));
}
}  // namespace

std::unique_ptr<Group> join_nodes(const std::string& name, int node, int place, int nodes, int ranks_a_node,
                                  std::shared_ptr<NodeLink> link, const GroupOptions& options) {
  check_nodes(nodes, ranks_a_node);
  auto inside = join_host_group(name, place, ranks_a_node, options);
  auto group = std::make_unique<NodeGroup>(std::move(inside), std::move(link), node, nodes);
  group->barrier("joining the nodes");
  return group;
}

std::vector<std::unique_ptr<Group>> create_virtual_nodes(int nodes, int ranks_a_node, const GroupOptions& options) {
  check_nodes(nodes, ranks_a_node);
  const auto links = create_memory_links(nodes * ranks_a_node);
  std::vector<std::unique_ptr<Group>> group;
  for (int node = 0; node < nodes; ++node) {
    const auto memory = create_group_memory(ranks_a_node);
    for (int place = 0; place < ranks_a_node; ++place) {
      group.push_back(std::make_unique<NodeGroup>(std::make_unique<HostGroup>(memory, place, ranks_a_node, options),
                                                  links[group.size()], node, nodes));
    }
  }
  return group;
}

}  // namespace heddle
