// Ranks on several nodes (docs/nodes.md). Inside a node ranks share memory, as in any group; between nodes they send messages
// over a NodeLink. A group of this kind has its ranks numbered node after node: rank = node * ranks a node + place. Of the ways,
// elastic works on it, in either NodeMode. Recovery works on it too, given a store that all nodes reach (docs/recovery.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "heddle/group.hpp"

namespace heddle {

using NodeMessage = std::vector<std::byte>;

/// Messages between ranks of different nodes. No call waits; whoever waits polls take() and keeps a deadline. Messages of one
/// sender with one tag arrive in order. A link is used by one thread at a time. Throws Error of kind fault, naming the rank,
/// where the transport itself says that a rank is gone.
class NodeLink {
 public:
  virtual ~NodeLink() = default;
  /// Most bytes of a message.
  virtual std::size_t most_bytes() const = 0;
  /// Hands a message over.
  virtual void post(int peer, int tag, NodeMessage message) = 0;
  /// The next message of that peer and tag, if it is here.
  virtual std::optional<NodeMessage> take(int peer, int tag) = 0;
  /// The next message of that tag from whoever sent one.
  virtual std::optional<NodeMessage> take_any(int tag) = 0;
  /// Has all that was posted left, as far as the transport says? It may need to be asked until it has.
  virtual bool idle() = 0;
  /// Gives the transport time to move messages, also those that have left as far as it says. Whoever waits for something else,
  /// such as a word in shared memory, calls it meanwhile, for as long as it says true: where messages move by themselves it does
  /// nothing and says false. Throws nothing: what is wrong the other calls say.
  virtual bool progress() { return false; }
  /// After a rank was lost, to which messages never leave: idle() is from now on about what is posted later. Does nothing where a
  /// link's messages leave without their receivers.
  virtual void abandon() {}
};

/// What messages are about. Their tags are these and, after ranks were lost, these and a multiple of 8; up to 32,767.
enum NodeTag : int { node_abort = 0, node_meeting = 1, node_rows = 2, node_results = 3, node_hello = 4 };

/// `nodes` nodes of `ranks_a_node` ranks each in this process, one handle a rank, each used by one thread. Nodes share nothing but
/// a queue of messages: what several machines do, on one, to learn, test and debug. Throws InputError.
std::vector<std::unique_ptr<Group>> create_virtual_nodes(int nodes, int ranks_a_node, const GroupOptions& options = {});

/// A rank's place among nodes.
struct NodePlace {
  int node = 0;  ///< of `nodes`
  int rank = 0;  ///< of the node's `ranks_a_node`
  int nodes = 1;
  int ranks_a_node = 1;
};

/// This process's rank of a group over nodes: `link` reaches the ranks of other nodes, and ranks of this node meet by the name
/// (see join_process_group), which must differ from node to node where nodes share a machine. `store`: words that the ranks of all
/// nodes reach (open_directory_store), without which nothing is recovered. Throws InputError for a place that is not one of its
/// nodes, and as join_process_group does.
std::unique_ptr<Group> join_nodes(const std::string& name, const NodePlace& mine, std::shared_ptr<NodeLink> link,
                                  const GroupOptions& options = {}, std::shared_ptr<Store> store = nullptr);

/// Whose place new processes take.
enum class Returning : std::uint8_t {
  rank,  ///< one rank's: others of its node live, and let it in as rejoin_process_group says
  node,  ///< those of all ranks of a node, which meet first as they do in join_process_group
};

/// A process that takes the place of one that has ended, in a group that runs under recovery; it belongs to the group again when it
/// has come back there (RecoveringLayers, Entry::late). `link` must reach, and be reached by, the ranks that are there. Throws as
/// join_nodes and rejoin_process_group do.
std::unique_ptr<Group> rejoin_nodes(Returning returning, const std::string& name, const NodePlace& mine,
                                    std::shared_ptr<NodeLink> link, std::shared_ptr<Store> store, const GroupOptions& options = {});

}  // namespace heddle
