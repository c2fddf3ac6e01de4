// Who of a node speaks with a rank of another one: the rank at the same place or, where that one is lost, the next live one.
#pragma once

#include <optional>
#include <vector>

namespace heddle {

/// `live` [ranks]. None where all ranks of the node are lost.
inline std::optional<int> counterpart(const std::vector<bool>& live, int ranks_a_node, int node, int place) {
  for (int i = 0; i < ranks_a_node; ++i) {
    const int rank = node * ranks_a_node + (place + i) % ranks_a_node;
    if (live[static_cast<std::size_t>(rank)]) return rank;
  }
  return std::nullopt;
}

/// Those of all other nodes, in the order of the nodes.
inline std::vector<int> counterparts(const std::vector<bool>& live, int ranks_a_node, int rank) {
  std::vector<int> ranks;
  for (int node = 0; node < static_cast<int>(live.size()) / ranks_a_node; ++node) {
    if (node == rank / ranks_a_node) continue;
    if (const auto other = counterpart(live, ranks_a_node, node, rank % ranks_a_node)) ranks.push_back(*other);
  }
  return ranks;
}

}  // namespace heddle
