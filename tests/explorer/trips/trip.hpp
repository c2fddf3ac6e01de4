// What the trips share. A trip is a way as the explorer runs it: ordinary memory, the calls of the
// protocol's halves, and a check of what arrived. Everything is checked against Batches, never against
// what a protocol computed.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "exchange/all_gather.hpp"
#include "exchange/arrivals.hpp"
#include "explorer/round_trip.hpp"

namespace heddle::explorer {

template <class T>
std::vector<T> room(std::size_t size, T value = {}) {
  return std::vector<T>(std::max<std::size_t>(size, 1), value);
}

/// Where `items` are numbered in `classes`, however small the chunks.
inline std::vector<std::int32_t> chunks(int items, int classes) {
  return room<std::int32_t>(static_cast<std::size_t>((items + 1) * classes));
}

/// Memory(batches, layout): the ordinary memory of one rank.
template <class Layout, class Memory>
class Trip {
 public:
  explicit Trip(const Batches& batches) : batches_(batches) {
    layout_.shape = batches.shape();
    layout_.wire = batches.wire();
    layout_.returned = batches.returned();
  }
  const Areas& areas() const { return layout_.areas; }
  void begin() {
    ranks_.clear();
    for (int rank = 0; rank < layout_.shape.ranks; ++rank) ranks_.emplace_back(batches_, layout_);
  }

 protected:
  /// Once the layout is filled in: where its areas lie. There is always room to share the outputs.
  void place() {
    const auto outputs =
        static_cast<std::size_t>(layout_.shape.ranks * layout_.shape.cap) * sizeof(bf16) * static_cast<std::size_t>(hidden());
    layout_.areas = place_areas(layout_.shape.ranks, layout_.dispatch_bytes(), layout_.combine_bytes(), outputs);
  }
  template <class W>
  Memory& memory(const W& w) {
    return ranks_[static_cast<std::size_t>(w.heap().rank)];
  }
  int hidden() const { return layout_.wire.hidden; }
  int topk() const { return layout_.shape.topk; }
  SendInput input(int call, int rank) const { return batches_.input(call, rank); }

  static std::string row_name(int source, int token) { return fmt::format("the row of token {} from rank {}", token, source); }
  static void put(std::vector<bf16>& to, std::size_t row, const std::vector<bf16>& values) {
    std::copy(values.begin(), values.end(), to.begin() + static_cast<std::ptrdiff_t>(row * values.size()));
  }
  /// The routing of row `i` must be that of this token, with foreign experts left out.
  template <class W>
  void check_routing(W& w, int call, int source, int token, std::size_t i, const ArrivedRouting& routing) {
    const SendInput sent = input(call, source);
    const PlacementView placement = batches_.placement();
    std::vector<std::int32_t> ids;
    for (int choice = 0; choice < topk(); ++choice) {
      const std::int32_t id = sent.ids[token * topk() + choice];
      ids.push_back(id >= 0 && placement.rank_of[id] == w.heap().rank ? placement.local_index[id] : -1);
    }
    const std::vector<float> weights(sent.weights + token * topk(), sent.weights + (token + 1) * topk());
    expect_bytes(w, ids, routing.local_ids + i * ids.size(), "the ids of " + row_name(source, token));
    expect_bytes(w, weights, routing.weights + i * ids.size(), "the weights of " + row_name(source, token));
  }

  const Batches& batches_;
  Layout layout_;
  std::vector<Memory> ranks_;
};

/// Any trip under tensor-parallel attention: at the end all ranks get all outputs.
template <class Way>
class WithAllGather : public Way {
 public:
  static constexpr const char* name = Way::name;
  explicit WithAllGather(const Batches& batches) : Way(batches), all_batches_(batches) {}

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const auto hidden = static_cast<std::size_t>(all_batches_.problem().hidden);
    const AllGatherLayout layout{all_batches_.shape(), static_cast<int>(hidden), this->areas()};
    const int first = all_batches_.tokens_before(call, w.heap().rank);
    const int tokens = all_batches_.input(call, w.heap().rank).tokens;
    const int all = all_batches_.all_tokens(call);
    std::vector<bf16>& everybody = outputs_[static_cast<std::size_t>(w.heap().rank)];
    if (!Way::combine(w, call, out)) return false;
    w.end_launch();
    if (!all_gather_rows(w, layout, first, tokens, all, out, everybody.data())) return false;
    w.end_launch();
    for (int rank = 0; w.index() == 0 && rank < layout.shape.ranks; ++rank) {
      const auto begin = static_cast<std::size_t>(all_batches_.tokens_before(call, rank));
      expect_bytes(w, all_batches_.outputs(call, rank), everybody.data() + begin * hidden,
                   fmt::format("the gathered output of rank {}", rank));
    }
    return true;
  }
  void begin() {
    Way::begin();
    const ExchangeShape shape = all_batches_.shape();
    outputs_.assign(static_cast<std::size_t>(shape.ranks),
                    room<bf16>(static_cast<std::size_t>(shape.ranks * shape.cap * all_batches_.problem().hidden)));
  }

 private:
  const Batches& all_batches_;
  std::vector<std::vector<bf16>> outputs_;
};

}  // namespace heddle::explorer
