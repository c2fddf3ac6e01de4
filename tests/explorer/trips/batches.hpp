// elastic over several nodes by batches, as GPUs do it. A swap is a message each way, ordinary memory whose arrival is a word in a
// row that elastic leaves free; whoever swaps goes on when its peers' messages are here.
#pragma once

#include <map>
#include <numeric>

#include "exchange/nodes/batch_protocol.hpp"
#include "explorer/trips/elastic.hpp"

namespace heddle::explorer {

/// Two nodes, or as many as there are ranks where those are odd.
template <NodeMode mode>
class BatchesTrip : public ElasticTrip<Reduce::rank, false> {
 public:
  static constexpr const char* name = mode == NodeMode::hybrid ? "batches, hybrid" : "batches, direct";
  explicit BatchesTrip(const Batches& batches) : ElasticTrip<Reduce::rank, false>(batches) {
    const int ranks = batches.shape().ranks;
    batches_of_.nodes = {this->layout_, ranks % 2 == 0 ? 2 : ranks, mode};
  }

  void begin() {
    ElasticTrip<Reduce::rank, false>::begin();
    posted_.clear();
    const ElasticLayout& elastic = batches_of_.nodes.elastic;
    const std::size_t batch = align_up(batches_of_.batch_bytes(elastic.shape.cap), 128);
    own_.assign(static_cast<std::size_t>(elastic.shape.ranks), {});
    for (Own& own : own_) {
      own.batch.resize(batch);
      own.arrived.resize(batch * static_cast<std::size_t>(batches_of_.peers()));
      own.results.resize(batches_of_.result(batches_of_.strangers(), 0));
      own.mail = {own.batch.data(), own.arrived.data(), batch, own.results.data(), nullptr, nullptr};
    }
  }

  template <class W>
  bool dispatch(W& w, int call) {
    const int rank = w.heap().rank;
    Own& own = own_[static_cast<std::size_t>(rank)];
    ElasticMemory& memory = this->memory(w);
    const ElasticScratch scratch = memory.scratch();
    const SendInput input = this->input(call, rank);
    if (!batch_send(w, batches_of_, input, this->batches_.placement(), scratch, own.batch.data())) return false;
    w.end_launch();
    if (w.index() == 0 && !swap_batches(w, own, call, input.tokens)) return false;
    w.end_launch();
    if (!batch_forward(w, batches_of_, own.mail)) return false;
    const std::int32_t* arrived = elastic_receive(w, this->layout_, scratch);
    if (arrived == nullptr) return false;
    const int n = std::accumulate(arrived, arrived + w.heap().ranks, 0);
    const auto room = static_cast<int>(this->layout_.region_rows());
    if (!elastic_list(w, this->layout_, arrived, n, room, this->batches_.placement(), scratch)) return false;
    elastic_copy_out(w, this->layout_, arrived, n, memory.rows.data());
    return true;
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    Own& own = own_[static_cast<std::size_t>(w.heap().rank)];
    ElasticMemory& memory = this->memory(w);
    const ElasticScratch scratch = memory.scratch();
    ElasticResults results;
    results.summed = true;
    results.rows = results.sums = memory.sums.data();
    results.weighted = true;
    if (!nodes_return(w, batches_of_.nodes, results, scratch, {})) return false;
    w.end_launch();
    if (!nodes_hear_results(w, batches_of_.nodes)) return false;
    w.end_launch();
    if (w.index() == 0 && !swap_results(w, own, call)) return false;
    w.end_launch();
    return batch_collect(w, batches_of_, this->input(call, w.heap().rank), scratch, own.mail, {}, out);
  }

 private:
  struct Own {
    std::vector<std::byte> batch, arrived, results;
    BatchMail mail;
  };
  /// Who gave whom which piece in which call; a swap of results has as many pieces as there are regions for the peer.
  struct Key {
    int call, from, to;
    bool results;
    int number;
    auto operator<=>(const Key&) const = default;
  };

  std::size_t word(int from, bool results) const {
    return word_at(this->layout_.areas, this->layout_.shape.ranks, (results ? combine_words : dispatch_words) + 1, from);
  }
  template <class W>
  void tell(W& w, int peer, bool results) {
    w.publish(w.heap().template at<Word>(peer, word(w.heap().rank, results)), 1);
  }
  template <class W>
  bool await(W& w, int peer, bool results) {
    const WordKind kind = results ? WordKind::elastic_node_results : WordKind::elastic_node_rows;
    std::uint32_t value = 0;
    return w.acquire(w.heap().template mine<const Word>(word(peer, results)), {kind, peer, -1}, value);
  }

  template <class W>
  bool swap_batches(W& w, Own& own, int call, int tokens) {
    const int rank = w.heap().rank;
    reinterpret_cast<BatchHead*>(own.batch.data())->tokens = static_cast<std::uint32_t>(tokens);
    for (int i = 0; i < batches_of_.peers(); ++i) {
      const int peer = batches_of_.peer(rank, i);
      posted_[{call, rank, peer, false, 0}] = own.batch;
      tell(w, peer, false);
    }
    for (int i = 0; i < batches_of_.peers(); ++i) {
      const int peer = batches_of_.peer(rank, i);
      if (!await(w, peer, false)) return false;
      const std::vector<std::byte>& came = posted_.at({call, peer, rank, false, 0});
      std::copy(came.begin(), came.end(), own.arrived.begin() + static_cast<std::ptrdiff_t>(own.mail.stride) * i);
    }
    return true;
  }

  template <class W>
  bool swap_results(W& w, Own& own, int call) {
    const int rank = w.heap().rank;
    const RowFormat& row = this->layout_.returned;
    const int cap = this->layout_.shape.cap;
    std::map<int, int> sent, taken;
    for (int i = 0; i < batches_of_.strangers(); ++i) {
      const int region = batches_of_.stranger(rank, i);
      const int peer = batches_of_.peer_of_region(rank, region);
      std::vector<std::byte>& piece = posted_[{call, rank, peer, true, sent[peer]++}];
      piece.resize(static_cast<std::size_t>(cap) * row.row_bytes());
      for (int slot = 0; slot < cap; ++slot) {
        w.complete(w.copy_row(piece.data() + static_cast<std::size_t>(slot) * row.row_bytes(),
                              w.heap().template mine<std::byte>(this->layout_.summed_row(region, slot)), row));
      }
    }
    for (const auto& [peer, pieces] : sent) tell(w, peer, true);
    for (const auto& [peer, pieces] : sent) {
      if (!await(w, peer, true)) return false;
    }
    for (int i = 0; i < batches_of_.strangers(); ++i) {
      const int peer = batches_of_.peer_of_region(rank, batches_of_.stranger(rank, i));
      const std::vector<std::byte>& came = posted_.at({call, peer, rank, true, taken[peer]++});
      std::copy(came.begin(), came.end(), own.results.begin() + static_cast<std::ptrdiff_t>(batches_of_.result(i, 0)));
    }
    return true;
  }

  BatchLayout batches_of_;
  std::vector<Own> own_;
  std::map<Key, std::vector<std::byte>> posted_;
};

}  // namespace heddle::explorer
