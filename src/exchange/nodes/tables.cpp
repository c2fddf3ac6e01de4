#include "exchange/nodes/tables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "heddle/error.hpp"

namespace heddle {

MessageNumbers number_messages(const NodesLayout& layout, const SendInput& input, const PlacementView& placement, int rank,
                               std::span<const int> peers) {
  MessageNumbers messages;
  messages.numbers.assign(static_cast<std::size_t>(input.tokens) * peers.size(), -1);
  messages.counts.assign(peers.size(), 0);
  for (int token = 0; token < input.tokens; ++token) {
    for (int choice = 0; choice < input.topk; ++choice) {
      const int d = placement.rank_of_choice(input.ids[token * input.topk + choice]);
      if (d < 0 || layout.together(rank, d)) continue;
      const int peer = layout.rows_forwarded() ? layout.rank_of(layout.node_of(d), layout.place_of(rank)) : d;
      const auto p = static_cast<std::size_t>(std::lower_bound(peers.begin(), peers.end(), peer) - peers.begin());
      std::int32_t& number = messages.numbers[static_cast<std::size_t>(token) * peers.size() + p];
      if (number < 0) number = messages.counts[p]++;
    }
  }
  return messages;
}

MessageSlots place_message(const NodesLayout& layout, const std::byte* message, std::size_t tokens, const PlacementView& placement,
                           int rank) {
  const auto inside = static_cast<std::size_t>(layout.ranks_a_node());
  MessageSlots placed;
  placed.slots.assign(tokens * inside, -1);
  placed.totals.assign(inside, 0);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(layout.elastic.shape.topk));
  for (std::size_t token = 0; token < tokens; ++token) {
    std::memcpy(ids.data(), message + layout.record(token) + layout.routing_in_record(), ids.size() * sizeof ids[0]);
    for (const std::int32_t id : ids) {
      const int d = placement.rank_of_choice(id);
      if (d < 0 || !layout.together(rank, d) || (!layout.rows_forwarded() && d != rank)) continue;
      const auto place = static_cast<std::size_t>(layout.place_of(d));
      std::int32_t& slot = placed.slots[token * inside + place];
      if (slot < 0) slot = placed.totals[place]++;
    }
  }
  return placed;
}

std::vector<std::int32_t> results_before(const NodesLayout& layout, const std::int32_t* arrived, const std::int32_t* local_ids) {
  const int topk = layout.elastic.shape.topk;
  std::vector<std::int32_t> before;
  for (int source = 0; source < layout.elastic.shape.ranks; ++source) {
    std::int32_t results = 0;
    for (int row = 0; row < arrived[source]; ++row) {
      const std::int32_t* ids = local_ids + static_cast<std::ptrdiff_t>(before.size()) * topk;
      before.push_back(results);
      results += static_cast<std::int32_t>(std::count_if(ids, ids + topk, [](std::int32_t id) { return id >= 0; }));
    }
  }
  return before;
}

namespace {

/// A message's rows one after the other.
class RowsInOrder {
 public:
  RowsInOrder(const NodesLayout& layout, const NodeMessage& message) : layout_(layout), message_(message) {}
  const std::byte* next(int peer) {
    const std::size_t at = layout_.result(number_++);
    if (at + layout_.elastic.returned.row_bytes() > message_.size())
      throw Error(ErrorKind::fault,
                  fmt::format("the results of rank {} end after {} rows, more were sent there", peer, number_ - 1));
    return message_.data() + at;
  }

 private:
  const NodesLayout& layout_;
  const NodeMessage& message_;
  std::size_t number_ = 0;
};

}  // namespace

std::vector<const std::byte*> result_rows(const NodesLayout& layout, const HeapView& heap, const SendInput& input,
                                          const PlacementView& placement, const std::int32_t* slots,
                                          std::span<const NodeMessage> messages) {
  const bool by_rank = layout.elastic.reduce == Reduce::rank;
  const int terms = by_rank ? heap.ranks : input.topk;
  std::vector<RowsInOrder> arriving;
  for (const NodeMessage& message : messages) arriving.emplace_back(layout, message);
  std::vector<const std::byte*> rows(static_cast<std::size_t>(input.tokens) * static_cast<std::size_t>(terms), nullptr);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int d = by_rank ? static_cast<int>(i) % terms : placement.rank_of_choice(input.ids[i]);
    if (d < 0 || (by_rank && slots[i] < 0)) continue;
    if (layout.together(heap.rank, d)) {
      rows[i] = heap.mine<std::byte>(by_rank ? layout.elastic.summed_row(d, slots[i]) : layout.elastic.slot(i));
      continue;
    }
    const int peer = layout.results_forwarded() ? layout.rank_of(layout.node_of(d), layout.place_of(heap.rank)) : d;
    rows[i] = arriving[static_cast<std::size_t>(peer)].next(peer);
  }
  return rows;
}

}  // namespace heddle
