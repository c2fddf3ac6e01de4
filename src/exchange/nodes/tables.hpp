// What both ends of a message know of it from the same routing: which tokens it holds, where they go, which results come back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/nodes/layout.hpp"
#include "exchange/sending.hpp"
#include "heddle/nodes.hpp"

namespace heddle {

/// Which tokens each message out holds: numbers [tokens, peers], -1: not in it; counts [peers].
struct MessageNumbers {
  std::vector<std::int32_t> numbers, counts;
};
MessageNumbers number_messages(const NodesLayout& layout, const SendInput& input, const PlacementView& placement, int rank,
                               std::span<const int> peers);

/// The slots that a message's tokens have at the ranks of this node: slots [tokens, ranks a node], -1: not there; totals [ranks a
/// node]. In direct mode this rank is the only one.
struct MessageSlots {
  std::vector<std::int32_t> slots, totals;
};
MessageSlots place_message(const NodesLayout& layout, const std::byte* message, std::size_t tokens, const PlacementView& placement,
                           int rank);

/// Of each arrived row, how many results of its source's rows before it there are (reduce = home). local_ids [arrived rows, topk].
std::vector<std::int32_t> results_before(const NodesLayout& layout, const std::int32_t* arrived, const std::int32_t* local_ids);

/// The rows that make each token's sum, in the order in which they are added: [tokens, ranks], with reduce = home [tokens, topk];
/// null: none. They lie in this rank's combine area and in `messages` [ranks]. slots [tokens, ranks]: where tokens went. Throws
/// Error of kind fault where a message ends too early.
std::vector<const std::byte*> result_rows(const NodesLayout& layout, const HeapView& heap, const SendInput& input,
                                          const PlacementView& placement, const std::int32_t* slots,
                                          std::span<const NodeMessage> messages);

}  // namespace heddle
