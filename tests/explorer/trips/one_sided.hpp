#pragma once

#include "exchange/one_sided/protocol.hpp"
#include "explorer/trips/trip.hpp"

namespace heddle::explorer {

struct OneSidedMemory {
  OneSidedMemory(const Batches&, const OneSidedLayout& layout)
      : slots(room<std::int32_t>(static_cast<std::size_t>(layout.shape.cap * layout.shape.ranks))),
        sent(room<std::int32_t>(static_cast<std::size_t>(layout.shape.ranks))),
        before(chunks(layout.shape.cap, layout.shape.ranks)),
        arrived(sent),
        results(room<bf16>(layout.blocks() * static_cast<std::size_t>(layout.wire.hidden))) {}
  OneSidedScratch scratch() { return {{slots.data(), sent.data(), before.data()}, arrived.data(), {}}; }
  std::vector<std::int32_t> slots, sent, before, arrived;
  std::vector<bf16> results;
};

class OneSidedTrip : public Trip<OneSidedLayout, OneSidedMemory> {
 public:
  static constexpr const char* name = "one_sided";
  explicit OneSidedTrip(const Batches& batches) : Trip(batches) { place(); }

  template <class W>
  bool dispatch(W& w, int call) {
    const OneSidedScratch scratch = memory(w).scratch();
    return one_sided_send(w, layout_, batches_.largest(call), input(call, w.heap().rank), batches_.placement(), scratch) &&
           one_sided_receive(w, layout_, scratch) != nullptr;
  }

  template <class W>
  void experts(W& w, int call) {
    OneSidedMemory& own = memory(w);
    const int rank = w.heap().rank;
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      const std::vector<int> tokens = batches_.tokens_to(call, s, rank);
      expect_equal(w, static_cast<int>(tokens.size()), own.arrived[static_cast<std::size_t>(s)],
                   fmt::format("the count from rank {}", s));
      for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
        const std::size_t number = OneSidedLayout::row_number(s, batches_.largest(call), static_cast<int>(slot));
        check_row(w, call, s, tokens[slot], number);
        put(own.results, number, batches_.partial_sum(call, s, tokens[slot], rank));
      }
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const int block_rows = batches_.largest(call);
    const OneSidedScratch scratch = memory(w).scratch();
    return one_sided_offer(w, layout_, block_rows, memory(w).results.data(), scratch) &&
           one_sided_pull(w, layout_, block_rows, input(call, w.heap().rank), scratch, {}, out);
  }

 private:
  template <class W>
  void check_row(W& w, int call, int source, int token, std::size_t number) {
    const std::string what = row_name(source, token);
    const SendInput sent = input(call, source);
    const std::size_t list_bytes = static_cast<std::size_t>(topk()) * sizeof(std::int32_t);
    const HeapView& heap = w.heap();
    const auto row = fetch(w, heap.mine<std::byte>(layout_.row(number)), layout_.wire.row_bytes());
    expect_bytes(w, batches_.row(call, source, token), row.data(), what);
    const auto routing = fetch(w, heap.mine<std::byte>(layout_.routing(number)), 2 * list_bytes);
    const std::vector<std::int32_t> ids(sent.ids + token * topk(), sent.ids + (token + 1) * topk());
    const std::vector<float> weights(sent.weights + token * topk(), sent.weights + (token + 1) * topk());
    expect_bytes(w, ids, routing.data(), "the ids of " + what);
    expect_bytes(w, weights, routing.data() + list_bytes, "the weights of " + what);
  }
};

}  // namespace heddle::explorer
