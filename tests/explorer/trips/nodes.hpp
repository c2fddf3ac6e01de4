// elastic over several nodes. A message is ordinary memory, and its arrival a word in a row that elastic leaves free: what a link
// does, as the memory model has it, with every order of arrivals.
#pragma once

#include <map>
#include <numeric>

#include "exchange/nodes/protocol.hpp"
#include "exchange/nodes/tables.hpp"
#include "explorer/trips/elastic.hpp"

namespace heddle::explorer {

/// Two nodes, or as many as there are ranks where those are odd.
template <NodeMode mode, Reduce reduce>
class NodesTrip : public ElasticTrip<reduce, false> {
 public:
  static constexpr const char* name = mode == NodeMode::hybrid
                                          ? (reduce == Reduce::rank ? "nodes, hybrid" : "nodes, hybrid, slots")
                                          : (reduce == Reduce::rank ? "nodes, direct" : "nodes, direct, slots");
  explicit NodesTrip(const Batches& batches) : ElasticTrip<reduce, false>(batches) {
    const int ranks = batches.shape().ranks;
    nodes_ = {this->layout_, ranks % 2 == 0 ? 2 : ranks, mode};
  }

  void begin() {
    ElasticTrip<reduce, false>::begin();
    mail_.clear();
    ranks_of_nodes_.assign(static_cast<std::size_t>(nodes_.elastic.shape.ranks), {});
    for (int rank = 0; rank < nodes_.elastic.shape.ranks; ++rank) {
      for (int peer = 0; peer < nodes_.elastic.shape.ranks; ++peer) {
        Node& own = ranks_of_nodes_[static_cast<std::size_t>(rank)];
        if (nodes_.is_peer(rank, peer, nodes_.rows_forwarded())) own.row_peers.push_back(peer);
        if (nodes_.is_peer(rank, peer, nodes_.results_forwarded())) own.result_peers.push_back(peer);
      }
    }
  }

  template <class W>
  bool dispatch(W& w, int call) {
    const int rank = w.heap().rank;
    Node& own = node(w);
    ElasticMemory& memory = this->memory(w);
    const ElasticScratch scratch = memory.scratch();
    const SendInput input = this->input(call, rank);
    if (w.index() == 0) fill(own, input, rank);
    w.end_launch();
    const FilledMessages filled{static_cast<int>(own.places.size()), own.places.data(), own.numbers.numbers.data()};
    if (!nodes_send(w, nodes_, input, this->batches_.placement(), scratch, filled)) return false;
    w.end_launch();
    if (w.index() == 0 && !(post_rows(w, own, call) && take_rows(w, own, call))) return false;
    w.end_launch();
    const auto count = static_cast<int>(own.arrived.size());
    if (!nodes_forward(w, nodes_, own.arrived.data(), count, nodes_.rows_forwarded())) return false;
    w.end_launch();
    const std::int32_t* arrived = elastic_receive(w, nodes_.elastic, scratch);
    if (arrived == nullptr) return false;
    const int n = std::accumulate(arrived, arrived + w.heap().ranks, 0);
    const auto room = static_cast<int>(nodes_.elastic.region_rows());
    if (!elastic_list(w, nodes_.elastic, arrived, n, room, this->batches_.placement(), scratch)) return false;
    elastic_copy_out(w, nodes_.elastic, arrived, n, memory.rows.data());
    return true;
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    Node& own = node(w);
    ElasticMemory& memory = this->memory(w);
    const ElasticScratch scratch = memory.scratch();
    const SendInput input = this->input(call, w.heap().rank);
    ElasticResults results;
    results.summed = reduce == Reduce::rank;
    results.rows = results.summed ? memory.sums.data() : memory.results.data();
    results.weighted = true;
    results.sums = memory.sums.data();
    if (w.index() == 0) room_for_results(w, own, scratch);
    w.end_launch();
    if (!nodes_return(w, nodes_, results, scratch, {own.result_places.data(), own.before.data()})) return false;
    w.end_launch();
    if (w.index() == 0 && !nodes_.results_forwarded() && !post_results(w, own, call, own.results)) return false;
    if (!nodes_hear_results(w, nodes_)) return false;
    w.end_launch();
    if (nodes_.results_forwarded()) {
      const auto count = static_cast<int>(own.arrived.size());
      if (!nodes_gather(w, nodes_, own.arrived.data(), count, own.forwarded_places.data())) return false;
      w.end_launch();
      if (w.index() == 0 && !post_results(w, own, call, own.forwarded)) return false;
    }
    if (w.index() == 0 && !take_results(w, own, call)) return false;
    w.end_launch();
    if (w.index() == 0)
      own.terms = result_rows(nodes_, w.heap(), input, this->batches_.placement(), memory.slots.data(), own.arrived_results);
    w.end_launch();
    const bool by_rank = reduce == Reduce::rank;
    return nodes_collect(w, nodes_, input, own.terms.data(), by_rank ? w.heap().ranks : input.topk, !by_rank, {}, out);
  }

 private:
  /// What a rank keeps from one half to the next.
  struct Node {
    std::vector<int> row_peers, result_peers;
    MessageNumbers numbers;
    std::vector<NodeMessage> rows;
    std::vector<std::byte*> places;
    std::vector<NodeMessage> arrived_rows;
    std::vector<MessageSlots> placed;
    std::vector<ArrivedMessage> arrived;
    std::map<int, NodeMessage> results, forwarded;
    std::vector<std::byte*> result_places, forwarded_places;
    std::vector<std::int32_t> before;
    std::vector<NodeMessage> arrived_results;
    std::vector<const std::byte*> terms;
  };
  /// Who sent what to whom in which call, each in memory of its own.
  struct Key {
    int call, from, to;
    bool results;
    auto operator<=>(const Key&) const = default;
  };

  template <class W>
  Node& node(const W& w) {
    return ranks_of_nodes_[static_cast<std::size_t>(w.heap().rank)];
  }
  std::size_t word(int from, bool results) const {
    const ElasticLayout& elastic = nodes_.elastic;
    return word_at(elastic.areas, elastic.shape.ranks, (results ? combine_words : dispatch_words) + 1, from);
  }
  template <class W>
  void post(W& w, const Key& key, NodeMessage message) {
    mail_[key] = std::move(message);
    w.publish(w.heap().template at<Word>(key.to, word(key.from, key.results)), 1);
  }
  template <class W>
  bool take(W& w, const Key& key, NodeMessage& message) {
    const WordKind kind = key.results ? WordKind::elastic_node_results : WordKind::elastic_node_rows;
    std::uint32_t value = 0;
    if (!w.acquire(w.heap().template mine<const Word>(word(key.from, key.results)), {kind, key.from, -1}, value)) return false;
    message = mail_.at(key);
    return true;
  }

  void fill(Node& own, const SendInput& input, int rank) {
    own.numbers = number_messages(nodes_, input, this->batches_.placement(), rank, own.row_peers);
    own.rows.clear();
    own.places.clear();
    for (const std::int32_t count : own.numbers.counts)
      own.places.push_back(own.rows.emplace_back(nodes_.record(static_cast<std::size_t>(count))).data());
  }
  template <class W>
  bool post_rows(W& w, Node& own, int call) {
    for (std::size_t p = 0; p < own.row_peers.size(); ++p) post(w, {call, w.heap().rank, own.row_peers[p], false}, own.rows[p]);
    return true;
  }
  template <class W>
  bool take_rows(W& w, Node& own, int call) {
    const int rank = w.heap().rank;
    own.arrived_rows.assign(own.row_peers.size(), {});
    own.placed.clear();
    own.arrived.clear();
    own.forwarded.clear();
    own.forwarded_places.clear();
    for (std::size_t p = 0; p < own.row_peers.size(); ++p) {
      const int peer = own.row_peers[p];
      NodeMessage& message = own.arrived_rows[p];
      if (!take(w, {call, peer, rank, false}, message)) return false;
      const std::size_t tokens = (message.size() - nodes_.record(0)) / nodes_.record_bytes();
      const MessageSlots& placed =
          own.placed.emplace_back(place_message(nodes_, message.data(), tokens, this->batches_.placement(), rank));
      own.arrived.push_back({peer, static_cast<int>(tokens), message.data(), placed.slots.data(), placed.totals.data()});
      const auto rows = std::accumulate(placed.totals.begin(), placed.totals.end(), std::size_t{0});
      own.forwarded_places.push_back(own.forwarded.emplace(peer, NodeMessage(nodes_.result(rows))).first->second.data());
    }
    return true;
  }
  template <class W>
  void room_for_results(W& w, Node& own, const ElasticScratch& scratch) {
    own.before = results_before(nodes_, scratch.arrived, scratch.routing.local_ids);
    own.result_places.assign(static_cast<std::size_t>(w.heap().ranks), nullptr);
    own.results.clear();
    for (const int peer : own.result_peers) {
      if (nodes_.results_forwarded()) continue;
      const auto most = static_cast<std::size_t>(nodes_.elastic.shape.cap) * nodes_.results_a_token();
      own.result_places[static_cast<std::size_t>(peer)] =
          own.results.emplace(peer, NodeMessage(nodes_.result(most))).first->second.data();
    }
  }
  template <class W>
  bool post_results(W& w, Node&, int call, const std::map<int, NodeMessage>& messages) {
    for (const auto& [peer, message] : messages) post(w, {call, w.heap().rank, peer, true}, message);
    return true;
  }
  template <class W>
  bool take_results(W& w, Node& own, int call) {
    own.arrived_results.assign(static_cast<std::size_t>(w.heap().ranks), {});
    for (const int peer : own.result_peers) {
      if (!take(w, {call, peer, w.heap().rank, true}, own.arrived_results[static_cast<std::size_t>(peer)])) return false;
    }
    return true;
  }

  NodesLayout nodes_;
  std::vector<Node> ranks_of_nodes_;
  std::map<Key, NodeMessage> mail_;
};

}  // namespace heddle::explorer
