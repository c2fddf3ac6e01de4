// elastic over several nodes where nobody looks at counts before bytes are sent, as on GPUs: what a rank gives to ranks of other
// nodes has the size that the step's largest batch asks for. Out goes the whole batch, the same to every peer; back come regions of
// the combine area. In the heap all is as in nodes/layout.hpp.
#pragma once

#include "exchange/nodes/layout.hpp"

namespace heddle {

/// Goes ahead of a batch and of results.
struct alignas(128) BatchHead {
  std::uint32_t epoch = 0;
  std::uint32_t tokens = 0;
  std::uint32_t gave_up = 0;  ///< 1: nothing behind this is right, `fault` says why
  FaultRecord fault;
};
static_assert(sizeof(BatchHead) == 128);

struct BatchLayout {
  NodesLayout nodes;

  HEDDLE_HOST_DEVICE int ranks() const { return nodes.elastic.shape.ranks; }
  HEDDLE_HOST_DEVICE int first_on_node(int rank) const { return nodes.rank_of(nodes.node_of(rank), 0); }

  // Ranks whose batches come here, and to whom this one's goes.
  HEDDLE_HOST_DEVICE int peers() const { return nodes.rows_forwarded() ? nodes.nodes - 1 : strangers(); }
  HEDDLE_HOST_DEVICE int peer(int rank, int i) const {
    if (!nodes.rows_forwarded()) return stranger(rank, i);
    return nodes.rank_of(i < nodes.node_of(rank) ? i : i + 1, nodes.place_of(rank));
  }
  // Those of them to which a batch's rows go from here: this one, or all of this node.
  HEDDLE_HOST_DEVICE int targets() const { return nodes.rows_forwarded() ? nodes.ranks_a_node() : 1; }
  HEDDLE_HOST_DEVICE int first_target(int rank) const { return nodes.rows_forwarded() ? first_on_node(rank) : rank; }

  // All ranks of other nodes, in order.
  HEDDLE_HOST_DEVICE int strangers() const { return ranks() - nodes.ranks_a_node(); }
  HEDDLE_HOST_DEVICE int stranger(int rank, int i) const { return i < first_on_node(rank) ? i : i + nodes.ranks_a_node(); }
  HEDDLE_HOST_DEVICE int number_of_stranger(int rank, int other) const {
    return other < first_on_node(rank) ? other : other - nodes.ranks_a_node();
  }
  /// Whom the combine area's region of a rank of another node is exchanged with: for the same region, of this node's ranks, there.
  HEDDLE_HOST_DEVICE int peer_of_region(int rank, int region) const {
    return nodes.results_forwarded() ? nodes.rank_of(nodes.node_of(region), nodes.place_of(rank)) : region;
  }

  // A batch: head, rows for each rank [ranks], then a record a token: wire row, routing, its slot at each rank [ranks] (-1: none).
  HEDDLE_HOST_DEVICE static constexpr std::size_t totals() { return sizeof(BatchHead); }
  HEDDLE_HOST_DEVICE std::size_t slots_bytes() const { return static_cast<std::size_t>(ranks()) * sizeof(std::int32_t); }
  HEDDLE_HOST_DEVICE std::size_t routing_in_record() const { return nodes.elastic.wire.row_bytes(); }
  HEDDLE_HOST_DEVICE std::size_t slots_in_record() const { return routing_in_record() + routing_bytes(nodes.elastic.shape.topk); }
  HEDDLE_HOST_DEVICE std::size_t record_bytes() const { return align_up(slots_in_record() + slots_bytes(), 16); }
  HEDDLE_HOST_DEVICE std::size_t record(int token) const {
    return totals() + align_up(slots_bytes(), 16) + static_cast<std::size_t>(token) * record_bytes();
  }
  /// Of a batch of a step's largest size.
  HEDDLE_HOST_DEVICE std::size_t batch_bytes(int most_tokens) const { return record(most_tokens); }

  // Results that came, [strangers][cap] rows: what number_of_stranger(d) returned of the token with slot `slot` there.
  HEDDLE_HOST_DEVICE std::size_t result(int number, int slot) const {
    return nodes.elastic.row_number(number, slot) * nodes.elastic.returned.row_bytes();
  }
};

/// The memory of one rank for what it gives and gets.
struct BatchMail {
  std::byte* out = nullptr;      ///< the own batch
  std::byte* arrived = nullptr;  ///< [peers] batches, `stride` bytes each
  std::size_t stride = 0;
  std::byte* results = nullptr;        ///< as BatchLayout::result says
  BatchHead* results_head = nullptr;   ///< of what goes
  BatchHead* results_heads = nullptr;  ///< [peers] of what came
};

}  // namespace heddle
