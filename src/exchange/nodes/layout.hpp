// elastic over several nodes: who sends messages to whom, and what is in them (docs/protocols/nodes.md). In the heap rows lie as in
// elastic on one node, with a region for each source of the whole group, so that what arrives does not depend on the mode.
#pragma once

#include "exchange/elastic/layout.hpp"

namespace heddle {

struct NodesLayout {
  ElasticLayout elastic;  ///< its shape is the whole group's
  int nodes = 1;
  NodeMode mode = NodeMode::direct;

  HEDDLE_HOST_DEVICE int ranks_a_node() const { return elastic.shape.ranks / nodes; }
  HEDDLE_HOST_DEVICE int node_of(int rank) const { return rank / ranks_a_node(); }
  HEDDLE_HOST_DEVICE int place_of(int rank) const { return rank % ranks_a_node(); }
  HEDDLE_HOST_DEVICE int rank_of(int node, int place) const { return node * ranks_a_node() + place; }
  HEDDLE_HOST_DEVICE bool together(int rank, int other) const { return node_of(rank) == node_of(other); }

  /// Do rows, or results, go by the rank with the same place on the other node? Slots gain nothing by it: as many rows cross.
  HEDDLE_HOST_DEVICE bool rows_forwarded() const { return mode == NodeMode::hybrid; }
  HEDDLE_HOST_DEVICE bool results_forwarded() const { return mode == NodeMode::hybrid && elastic.reduce == Reduce::rank; }
  /// Does a rank exchange messages of that kind with a rank of another node?
  HEDDLE_HOST_DEVICE bool is_peer(int rank, int other, bool forwarded) const {
    return !together(rank, other) && (!forwarded || place_of(rank) == place_of(other));
  }
  std::size_t peers(bool forwarded) const {
    return static_cast<std::size_t>(forwarded ? nodes - 1 : elastic.shape.ranks - ranks_a_node());
  }

  // A message out: a header, then for each token, in token order, a row, its routing and its home token.
  static constexpr std::size_t header_bytes = 16;
  std::size_t record_bytes() const {
    return align_up(elastic.wire.row_bytes() + routing_bytes(elastic.shape.topk) + sizeof(std::int32_t), 16);
  }
  std::size_t record(std::size_t number) const { return header_bytes + number * record_bytes(); }
  std::size_t routing_in_record() const { return elastic.wire.row_bytes(); }
  std::size_t home_token_in_record() const { return routing_in_record() + routing_bytes(elastic.shape.topk); }
  // Back: a header, then rows: of each token in the order of the message out, one a rank in rank order, or one a choice.
  HEDDLE_HOST_DEVICE std::size_t result(std::size_t number) const { return header_bytes + number * elastic.returned.row_bytes(); }
  /// Most results of a token in a message.
  std::size_t results_a_token() const {
    if (elastic.reduce == Reduce::home) return static_cast<std::size_t>(elastic.shape.topk);
    return results_forwarded() ? static_cast<std::size_t>(ranks_a_node()) : 1;
  }
  std::size_t most_out_bytes() const { return record(static_cast<std::size_t>(elastic.shape.cap)); }
  std::size_t most_back_bytes() const { return result(static_cast<std::size_t>(elastic.shape.cap) * results_a_token()); }
  /// Ordinary memory of a rank for messages at most: from and to every peer, both ways.
  std::size_t message_bytes() const {
    return 2 * (peers(rows_forwarded()) * most_out_bytes() + peers(results_forwarded()) * most_back_bytes());
  }
};

}  // namespace heddle
