#pragma once

#include <array>

#include "exchange/normal/protocol.hpp"
#include "explorer/trips/trip.hpp"

namespace heddle::explorer {

struct NormalMemory {
  NormalMemory(const Batches& batches, const NormalLayout& layout)
      : topk(layout.shape.topk),
        slots(room<std::int32_t>(static_cast<std::size_t>(layout.shape.cap * layout.shape.ranks))),
        sent(room<std::int32_t>(static_cast<std::size_t>(layout.shape.ranks))),
        before(chunks(layout.shape.cap, layout.shape.ranks)),
        tokens(slots),
        arrived(sent),
        firsts(sent),
        returned_firsts(sent),
        local_ids(room<std::int32_t>(all_rows(layout) * static_cast<std::size_t>(topk))),
        weights(room<float>(local_ids.size())),
        wire_rows(static_cast<std::size_t>(layout.shape.cap) * batches.wire().row_bytes()),
        rows(all_rows(layout) * layout.wire.row_bytes()),
        returned(all_rows(layout) * layout.returned.row_bytes()),
        sums(all_rows(layout) * static_cast<std::size_t>(layout.wire.hidden)) {}
  static std::size_t all_rows(const NormalLayout& layout) {
    return static_cast<std::size_t>(layout.shape.cap * layout.shape.ranks);
  }
  NormalScratch scratch() {
    return {{slots.data(), sent.data(), before.data()}, arrived.data(), wire_rows.data(), tokens.data(), progress.data()};
  }
  ArrivedRouting routing() { return {topk, local_ids.data(), weights.data()}; }
  int topk;
  std::vector<std::int32_t> slots, sent, before, tokens, arrived, firsts, returned_firsts, local_ids;
  std::vector<float> weights;
  std::vector<std::byte> wire_rows, rows, returned;
  std::vector<bf16> sums;
  std::array<NormalProgress, max_workers> progress;
};

class NormalTrip : public Trip<NormalLayout, NormalMemory> {
 public:
  static constexpr const char* name = "normal";
  explicit NormalTrip(const Batches& batches) : Trip(batches) {
    layout_.queue_rows = batches.problem().queue_rows;
    layout_.chunk_rows = 1;
    place();
  }

  template <class W>
  bool dispatch(W& w, int call) {
    NormalMemory& own = memory(w);
    const SendInput sent = input(call, w.heap().rank);
    for (int token = w.index(); token < sent.tokens; token += w.count()) {
      w.quantise_row(own.wire_rows.data() + static_cast<std::size_t>(token) * layout_.wire.row_bytes(),
                     sent.hidden + token * hidden(), layout_.wire);
    }
    w.complete_all();
    if (!normal_exchange_counts(w, layout_, sent, batches_.placement(), own.scratch())) return false;
    w.end_launch();
    if (w.index() == 0) lay_out(own);
    w.end_launch();
    return normal_dispatch(w, layout_, sent, batches_.placement(), own.scratch(), own.firsts.data(), own.rows.data(),
                           own.routing());
  }

  template <class W>
  void experts(W& w, int call) {
    NormalMemory& own = memory(w);
    std::size_t i = 0;
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      const std::vector<int> tokens = batches_.tokens_to(call, s, w.heap().rank);
      expect_equal(w, static_cast<int>(tokens.size()), own.arrived[static_cast<std::size_t>(s)],
                   fmt::format("the count from rank {}", s));
      for (const int token : tokens) {
        expect_bytes(w, batches_.row(call, s, token), own.rows.data() + i * layout_.wire.row_bytes(), row_name(s, token));
        check_routing(w, call, s, token, i, own.routing());
        put(own.sums, i++, batches_.partial_sum(call, s, token, w.heap().rank));
      }
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    NormalMemory& own = memory(w);
    return normal_return(w, layout_, own.scratch(), own.firsts.data(), own.sums.data(), own.returned_firsts.data(),
                         own.returned.data()) &&
           normal_collect(w, layout_, input(call, w.heap().rank), own.scratch(), own.returned_firsts.data(), own.returned.data(),
                          {}, out);
  }

 private:
  /// What the host does once it has the counts.
  void lay_out(NormalMemory& own) const {
    int received = 0;
    int returned = 0;
    for (std::size_t peer = 0; peer < static_cast<std::size_t>(layout_.shape.ranks); ++peer) {
      own.firsts[peer] = received;
      own.returned_firsts[peer] = returned;
      received += own.arrived[peer];
      returned += own.sent[peer];
    }
  }
};

}  // namespace heddle::explorer
