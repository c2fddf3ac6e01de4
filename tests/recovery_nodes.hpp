// Groups over nodes whose ranks are processes, under recovery: how they meet, what is cut, killed and stopped.
#pragma once

#include "folder.hpp"
#include "recovery_processes.hpp"
#include "socket_mesh.hpp"

namespace heddle::layer_test {

/// What is tried over nodes.
struct NodeRoute {
  Reduce reduce = Reduce::rank;
  NodeMode mode = NodeMode::direct;
};
inline constexpr NodeRoute all_node_routes[] = {{Reduce::rank, NodeMode::hybrid},
                                                {Reduce::home, NodeMode::direct},
                                                {Reduce::rank, NodeMode::direct},
                                                {Reduce::home, NodeMode::hybrid}};
/// Under sanitizers only some.
inline std::span<const NodeRoute> node_routes() { return std::span(all_node_routes).first(is_sanitized ? 2 : 4); }

/// A group of processes over nodes that a test plays with.
class NodesPlay {
 public:
  NodesPlay(const NodeRoute& route, int nodes, int ranks_a_node, const std::string& name)
      : nodes_(nodes),
        inside_(ranks_a_node),
        layer_(recovery_case(ranks(), {Way::elastic, route.reduce}, 0).layer),
        weights_(layer_.source()),
        mesh_(ranks()) {
    scene_ = scene_of({Way::elastic, route.reduce}, ranks(), weights_, name);
    scene_.c.options.mode = route.mode;
    scene_.join = [this](int rank, Entry entry, const GroupOptions& options) { return join(rank, entry, options); };
  }

  int nodes() const { return nodes_; }
  int ranks() const { return nodes_ * inside_; }
  int ranks_a_node() const { return inside_; }
  const Scene& scene() const { return scene_; }
  SocketMesh::Switches& switches() const { return mesh_.switches(); }
  std::uint32_t bits_of_node(int node) const { return ((1u << inside_) - 1) << (node * inside_); }
  /// Nodes that start again as a whole: bits of ranks.
  std::atomic<std::uint32_t>& anew() { return *anew_; }

 private:
  std::unique_ptr<Group> join(int rank, Entry entry, const GroupOptions& options) const {
    const auto link = std::make_shared<SocketLink>(mesh_, rank);
    const auto store = std::make_shared<CutStore>(open_directory_store(folder_.path().string(), ranks()), mesh_, rank);
    const NodePlace place{rank / inside_, rank % inside_, nodes_, inside_};
    const std::string name = scene_.name + ".node" + std::to_string(place.node);
    if (entry == Entry::together) return join_nodes(name, place, link, options, store);
    const Returning returning = (*anew_ >> rank & 1) != 0 ? Returning::node : Returning::rank;
    return rejoin_nodes(returning, name, place, link, store, options);
  }

  int nodes_, inside_;
  SyntheticLayer layer_;
  GuardedWeights weights_;
  SocketMesh mesh_;
  TempFolder folder_;
  Scene scene_;
  std::atomic<std::uint32_t>* anew_ =
      new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<std::uint32_t>(0);
};

}  // namespace heddle::layer_test
