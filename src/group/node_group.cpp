#include "group/node_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "group/agreement.hpp"
#include "group/counterparts.hpp"
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

NodeGroup::NodeGroup(std::unique_ptr<HostGroup> inside, std::shared_ptr<NodeLink> link, int node, int nodes,
                     std::shared_ptr<Store> store)
    : inside_(std::move(inside)),
      link_(std::move(link)),
      node_(node),
      nodes_(nodes),
      live_(static_cast<std::size_t>(ranks()), true) {
  check_group_size(rank(), ranks());
  inside_->drive(link_);
  if (store) store_.emplace(std::move(store), link_);
}

std::optional<int> NodeGroup::speaker(int node) const { return counterpart(live_, inside_->ranks(), node, inside_->rank()); }

// Whoever is heard from has met all ranks of its own node before it spoke.
NodeGroup::Heard NodeGroup::hear_nodes(const NodeMessage& mine) {
  for (int other = 0; other < ranks(); ++other) {
    const bool hears_me = counterpart(live_, inside_->ranks(), node_, other % inside_->ranks()) == rank();
    if (other / inside_->ranks() != node_ && live_[static_cast<std::size_t>(other)] && hears_me)
      link_.post(other, node_meeting, mine);
  }
  const auto end = std::chrono::steady_clock::now() + deadline();
  Heard heard(static_cast<std::size_t>(nodes_));
  heard[static_cast<std::size_t>(node_)] = mine;
  for (PollPause pause;; pause.rest()) {
    const bool last = std::chrono::steady_clock::now() >= end;
    for (int node = 0; node < nodes_; ++node) {
      const auto from = speaker(node);
      if (from && !heard[static_cast<std::size_t>(node)]) heard[static_cast<std::size_t>(node)] = link_.take(*from, node_meeting);
    }
    if (last || !first_missing(heard)) break;
  }
  for (PollPause pause; !link_.idle() && std::chrono::steady_clock::now() < end;) pause.rest();
  return heard;
}

std::optional<int> NodeGroup::first_missing(const Heard& heard) const {
  for (int node = 0; node < nodes_; ++node) {
    if (speaker(node) && !heard[static_cast<std::size_t>(node)]) return node;
  }
  return std::nullopt;
}

NodeGroup::Heard NodeGroup::meet(const NodeMessage& mine, const std::string& what) {
  Heard heard = hear_nodes(mine);
  if (const auto missing = first_missing(heard)) {
    const auto came = std::count_if(heard.begin(), heard.end(), [](const auto& one) { return one.has_value(); });
    throw FaultError({rank(), *speaker(*missing), what, fmt::format("message of node {}", *missing),
                      static_cast<std::uint64_t>(nodes_), static_cast<std::uint64_t>(came)});
  }
  return heard;
}

void NodeGroup::barrier(const std::string& what) {
  inside_->barrier(what);
  meet({}, what);
}

std::vector<std::string> NodeGroup::exchange(const std::string& mine, const std::string& what) {
  std::vector<std::string> all;
  for (const auto& message : meet(packed(inside_->exchange(mine, what)), what)) {
    // Lost ranks say nothing.
    const auto texts = message ? unpacked(*message) : std::vector<std::string>(static_cast<std::size_t>(inside_->ranks()));
    all.insert(all.end(), texts.begin(), texts.end());
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
  throw InputError(
      "a group over several nodes is not reset by hand after a fault; under recovery (RecoveringLayers) it goes on with those who "
      "are left");
}

Store& NodeGroup::store() {
  if (!store_)
    throw InputError(
        "this group over several nodes has no store that all of them reach, which recovery needs; give the group one when it is "
        "joined (open_directory_store)");
  return *store_;
}

void NodeGroup::begin_era(std::uint32_t era, const std::vector<bool>& live) {
  if (live.size() != live_.size())
    throw InputError(fmt::format("an era with {} live flags for {} ranks", live.size(), live_.size()));
  const auto first = live.begin() + node_ * inside_->ranks();
  inside_->begin_era(era, std::vector<bool>(first, first + inside_->ranks()));
  live_ = live;
  link_.begin(era);
  const Heard heard = hear_nodes({});
  const auto missing = first_missing(heard);
  if (!missing) return;
  note_unheard(era, heard);
  // No rank is named: it may wait for one of its own node that was lost since, and will come to the next roll call.
  throw FaultError({rank(), -1, "group reset", fmt::format("message of node {}", *missing), era, 0});
}

/// All may live and reach the store, and yet not each other: the next roll call has to know (recovery/agreement.hpp).
void NodeGroup::note_unheard(std::uint32_t era, const Heard& heard) {
  std::uint32_t bits = 0;
  for (int node = 0; node < std::min(nodes_, 32); ++node)
    bits |= speaker(node) && !heard[static_cast<std::size_t>(node)] ? 1u << node : 0u;
  const StoreKey mine{StoreKey::Kind::unheard, rank()};
  std::uint64_t last = store().get(mine);
  while (last < pack_word(era, 0) && !store().compare_set(mine, last, pack_word(era, bits))) continue;
}

namespace {
void check_nodes(const NodePlace& mine) {
  if (mine.nodes < 1 || mine.ranks_a_node < 1)
    throw InputError(fmt::format("{} nodes of {} ranks: at least one of each is wanted", mine.nodes, mine.ranks_a_node));
  if (mine.node < 0 || mine.node >= mine.nodes || mine.rank < 0 || mine.rank >= mine.ranks_a_node)
    throw InputError(fmt::format("rank {} of node {}: there are {} nodes of {} ranks, both counted from 0", mine.rank, mine.node,
                                 mine.nodes, mine.ranks_a_node));
}
}  // namespace

std::unique_ptr<Group> join_nodes(const std::string& name, const NodePlace& mine, std::shared_ptr<NodeLink> link,
                                  const GroupOptions& options, std::shared_ptr<Store> store) {
  check_nodes(mine);
  auto inside = join_host_group(name, mine.rank, mine.ranks_a_node, options);
  auto group = std::make_unique<NodeGroup>(std::move(inside), std::move(link), mine.node, mine.nodes, std::move(store));
  group->barrier("joining the nodes");
  return group;
}

std::unique_ptr<Group> rejoin_nodes(Returning returning, const std::string& name, const NodePlace& mine,
                                    std::shared_ptr<NodeLink> link, std::shared_ptr<Store> store, const GroupOptions& options) {
  check_nodes(mine);
  auto inside = returning == Returning::node ? join_host_group(name, mine.rank, mine.ranks_a_node, options)
                                             : rejoin_host_group(name, mine.rank, mine.ranks_a_node, options);
  return std::make_unique<NodeGroup>(std::move(inside), std::move(link), mine.node, mine.nodes, std::move(store));
}

namespace {
/// Virtual nodes share a process, so what all of them reach is its memory.
std::shared_ptr<Store> memory_store(const std::shared_ptr<std::byte>& control, int rank, int ranks) {
  struct Kept {
    std::shared_ptr<std::byte> control;
    HostStore store;
  };
  const auto kept = std::make_shared<Kept>(Kept{control, HostStore({control.get(), control_stride, rank, ranks})});
  return {kept, &kept->store};
}
}  // namespace

std::vector<std::unique_ptr<Group>> create_virtual_nodes(int nodes, int ranks_a_node, const GroupOptions& options) {
  check_nodes({.nodes = nodes, .ranks_a_node = ranks_a_node});
  const int ranks = nodes * ranks_a_node;
  const auto links = create_memory_links(ranks);
  const auto control = create_group_memory(ranks)->map(0, control_stride * static_cast<std::size_t>(ranks));
  std::vector<std::unique_ptr<Group>> group;
  for (int node = 0; node < nodes; ++node) {
    const auto memory = create_group_memory(ranks_a_node);
    for (int place = 0; place < ranks_a_node; ++place) {
      group.push_back(std::make_unique<NodeGroup>(std::make_unique<HostGroup>(memory, place, ranks_a_node, options),
                                                  links[group.size()], node, nodes,
                                                  memory_store(control, static_cast<int>(group.size()), ranks)));
    }
  }
  return group;
}

}  // namespace heddle
