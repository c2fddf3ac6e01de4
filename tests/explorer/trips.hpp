// The ways as the explorer runs them: ordinary memory, the calls of the protocol's halves, and a check
// of what arrived. Everything is checked against Batches, never against what a protocol computed.
#pragma once

#include <string>
#include <vector>

#include "exchange/low_latency/protocol.hpp"
#include "exchange/one_sided/protocol.hpp"
#include "explorer/round_trip.hpp"

namespace heddle::explorer {

template <class Layout>
Layout make_layout(const Batches& batches) {
  Layout layout;
  layout.shape = batches.shape();
  layout.wire = batches.wire();
  layout.returned = batches.returned();
  return layout;
}

/// Fills in where the areas of a layout lie.
template <class Layout>
void place(Layout& layout, std::size_t output_bytes = 0) {
  layout.areas = place_areas(layout.shape.ranks, layout.shape.max_local_experts, layout.dispatch_bytes(), layout.combine_bytes(), output_bytes);
}

class OneSidedTrip {
 public:
  static constexpr const char* name = "one_sided";
  explicit OneSidedTrip(const Batches& batches) : batches_(batches), layout_(make_layout<OneSidedLayout>(batches)) { place(layout_); }
  const Areas& areas() const { return layout_.areas; }
  void begin() { ranks_.assign(static_cast<std::size_t>(layout_.shape.ranks), Memory(layout_)); }

  template <class W>
  bool dispatch(W& w, int call) {
    const OneSidedScratch scratch = memory(w).scratch();
    return one_sided_send(w, layout_, batches_.largest(call), batches_.input(call, w.heap().rank), batches_.placement(), scratch) &&
           one_sided_receive(w, layout_, scratch);
  }

  template <class W>
  void experts(W& w, int call) {
    Memory& own = memory(w);
    const int rank = w.heap().rank;
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      const std::vector<int> tokens = batches_.tokens_to(call, s, rank);
      expect_equal(w, static_cast<int>(tokens.size()), own.arrived[static_cast<std::size_t>(s)], fmt::format("the count from rank {}", s));
      for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
        const std::size_t number = OneSidedLayout::row_number(s, batches_.largest(call), static_cast<int>(slot));
        check_row(w, call, s, tokens[slot], number);
        const std::vector<bf16> sum = batches_.partial_sum(call, s, tokens[slot], rank);
        std::copy(sum.begin(), sum.end(), own.results.begin() + static_cast<std::ptrdiff_t>(number * sum.size()));
      }
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const Memory& own = memory(w);
    const int block_rows = batches_.largest(call);
    return one_sided_offer(w, layout_, block_rows, own.results.data(), own.scratch()) &&
           one_sided_pull(w, layout_, block_rows, batches_.input(call, w.heap().rank), own.scratch(), nullptr, out);
  }

 private:
  struct Memory {
    explicit Memory(const OneSidedLayout& layout)
        : slots(static_cast<std::size_t>(layout.shape.cap * layout.shape.ranks), -7),
          sent(static_cast<std::size_t>(layout.shape.ranks), -7),
          arrived(sent),
          results(layout.blocks() * static_cast<std::size_t>(layout.wire.hidden)) {}
    OneSidedScratch scratch() const {
      return {const_cast<std::int32_t*>(slots.data()), const_cast<std::int32_t*>(sent.data()), const_cast<std::int32_t*>(arrived.data()), {}};
    }
    std::vector<std::int32_t> slots, sent, arrived;
    std::vector<bf16> results;
  };
  template <class W>
  Memory& memory(const W& w) {
    return ranks_[static_cast<std::size_t>(w.heap().rank)];
  }
  template <class W>
  void check_row(W& w, int call, int source, int token, std::size_t number) {
    const std::string what = fmt::format("the row of token {} from rank {}", token, source);
    const SendInput sent = batches_.input(call, source);
    const std::size_t list_bytes = static_cast<std::size_t>(sent.topk) * sizeof(std::int32_t);
    expect_bytes(w, batches_.row(call, source, token), fetch(w, w.heap().template mine<std::byte>(layout_.row(number)), layout_.wire.row_bytes()).data(), what);
    const std::vector<std::byte> routing = fetch(w, w.heap().template mine<std::byte>(layout_.routing(number)), 2 * list_bytes);
    const std::vector<std::int32_t> ids(sent.ids + token * sent.topk, sent.ids + (token + 1) * sent.topk);
    const std::vector<float> weights(sent.weights + token * sent.topk, sent.weights + (token + 1) * sent.topk);
    expect_bytes(w, ids, routing.data(), "the ids of " + what);
    expect_bytes(w, weights, routing.data() + list_bytes, "the weights of " + what);
  }

  const Batches& batches_;
  OneSidedLayout layout_;
  std::vector<Memory> ranks_;
};

class LowLatencyTrip {
 public:
  static constexpr const char* name = "low_latency";
  explicit LowLatencyTrip(const Batches& batches) : batches_(batches), layout_(make_layout<LowLatencyLayout>(batches)) { place(layout_); }
  const Areas& areas() const { return layout_.areas; }
  void begin() { ranks_.assign(static_cast<std::size_t>(layout_.shape.ranks), Memory(layout_)); }

  template <class W>
  bool dispatch(W& w, int call) {
    const LowLatencyScratch scratch = memory(w).scratch();
    return low_latency_send(w, layout_, batches_.input(call, w.heap().rank), batches_.placement(), scratch) &&
           low_latency_receive(w, layout_, batches_.local_experts(w.heap().rank), scratch);
  }

  template <class W>
  void experts(W& w, int call) {
    Memory& own = memory(w);
    const int first = batches_.first_expert(w.heap().rank);
    for (int e = 0; e < batches_.local_experts(w.heap().rank); ++e) {
      auto row = static_cast<std::size_t>(e * own.block_rows);
      for (int s = 0; s < layout_.shape.ranks; ++s) {
        for (const int pair : batches_.pairs_of(call, s, first + e)) check_row(w, call, s, pair, row++, first + e);
      }
      expect_equal(w, static_cast<int>(row) - e * own.block_rows, own.counts[static_cast<std::size_t>(e)], fmt::format("the count of expert {}", first + e));
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const int rank = w.heap().rank;
    const LowLatencyScratch scratch = memory(w).scratch();
    return low_latency_return(w, layout_, batches_.local_experts(rank), memory(w).results.data(), scratch) &&
           low_latency_collect(w, layout_, batches_.input(call, rank), batches_.placement(), true, nullptr, out);
  }

 private:
  struct Memory {
    explicit Memory(const LowLatencyLayout& layout)
        : block_rows(layout.shape.ranks * layout.shape.cap),
          slots(static_cast<std::size_t>(layout.shape.cap * layout.shape.topk), -7),
          sent(static_cast<std::size_t>(layout.shape.experts), -7),
          arrived(static_cast<std::size_t>(layout.shape.max_local_experts * layout.shape.ranks), -7),
          counts(static_cast<std::size_t>(layout.shape.max_local_experts), -7),
          rows(layout.regions() * layout.wire.row_bytes()),
          origins(layout.regions()),
          weights(layout.regions()),
          results(layout.regions() * static_cast<std::size_t>(layout.wire.hidden)) {}
    LowLatencyScratch scratch() {
      return {slots.data(), sent.data(), arrived.data(), block_rows, rows.data(), origins.data(), weights.data(), counts.data()};
    }
    int block_rows;
    std::vector<std::int32_t> slots, sent, arrived, counts;
    std::vector<std::byte> rows;
    std::vector<PairOrigin> origins;
    std::vector<float> weights;
    std::vector<bf16> results;
  };
  template <class W>
  Memory& memory(const W& w) {
    return ranks_[static_cast<std::size_t>(w.heap().rank)];
  }
  /// Checks a packed row and lays the expert's result for it down.
  template <class W>
  void check_row(W& w, int call, int source, int pair, std::size_t row, int expert) {
    Memory& own = memory(w);
    const SendInput sent = batches_.input(call, source);
    const int token = pair / sent.topk;
    const std::string what = fmt::format("the row of token {} from rank {} for expert {}", token, source, expert);
    expect_bytes(w, batches_.row(call, source, token), own.rows.data() + row * layout_.wire.row_bytes(), what);
    expect_equal(w, pair, own.origins[row].pair, "the origin of " + what);
    expect_bytes(w, std::vector<float>{sent.weights[pair]}, &own.weights[row], "the weight of " + what);
    const std::vector<bf16> result = to_bf16s(batches_.expert_result(call, source, token, expert));
    std::copy(result.begin(), result.end(), own.results.begin() + static_cast<std::ptrdiff_t>(row * result.size()));
  }

  const Batches& batches_;
  LowLatencyLayout layout_;
  std::vector<Memory> ranks_;
};

}  // namespace heddle::explorer
