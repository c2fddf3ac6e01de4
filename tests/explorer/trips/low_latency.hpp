#pragma once

#include "exchange/low_latency/protocol.hpp"
#include "explorer/trips/trip.hpp"

namespace heddle::explorer {

struct LowLatencyMemory {
  LowLatencyMemory(const Batches&, const LowLatencyLayout& layout)
      : block_rows(layout.shape.ranks * layout.shape.cap),
        slots(room<std::int32_t>(static_cast<std::size_t>(layout.shape.cap * layout.shape.topk))),
        sent(room<std::int32_t>(static_cast<std::size_t>(layout.shape.experts))),
        before(chunks(layout.shape.cap * layout.shape.topk, layout.shape.experts)),
        arrived(room<std::int32_t>(static_cast<std::size_t>(layout.shape.max_local_experts * layout.shape.ranks))),
        counts(room<std::int32_t>(static_cast<std::size_t>(layout.shape.max_local_experts))),
        rows(layout.regions() * layout.wire.row_bytes()),
        origins(layout.regions()),
        weights(layout.regions()),
        results(layout.regions() * static_cast<std::size_t>(layout.wire.hidden)) {}
  LowLatencyScratch scratch() {
    return {{slots.data(), sent.data(), before.data()},
            arrived.data(),
            block_rows,
            rows.data(),
            origins.data(),
            weights.data(),
            counts.data()};
  }
  int block_rows;
  std::vector<std::int32_t> slots, sent, before, arrived, counts;
  std::vector<std::byte> rows;
  std::vector<PairOrigin> origins;
  std::vector<float> weights;
  std::vector<bf16> results;
};

class LowLatencyTrip : public Trip<LowLatencyLayout, LowLatencyMemory> {
 public:
  static constexpr const char* name = "low_latency";
  explicit LowLatencyTrip(const Batches& batches) : Trip(batches) { place(); }

  template <class W>
  bool dispatch(W& w, int call) {
    const LowLatencyScratch scratch = memory(w).scratch();
    const int local_experts = batches_.local_experts(w.heap().rank);
    if (!low_latency_send(w, layout_, input(call, w.heap().rank), batches_.placement(), scratch)) return false;
    const std::int32_t* arrived = low_latency_hear(w, layout_, local_experts, scratch);
    if (arrived == nullptr) return false;
    low_latency_pack(w, layout_, local_experts, arrived, scratch);
    return true;
  }

  template <class W>
  void experts(W& w, int call) {
    LowLatencyMemory& own = memory(w);
    const int first = batches_.first_expert(w.heap().rank);
    for (int e = 0; e < batches_.local_experts(w.heap().rank); ++e) {
      auto row = static_cast<std::size_t>(e * own.block_rows);
      for (int s = 0; s < layout_.shape.ranks; ++s) {
        for (const int pair : batches_.pairs_of(call, s, first + e)) check_row(w, call, s, pair, row++, first + e);
      }
      const int count = static_cast<int>(row) - e * own.block_rows;
      expect_equal(w, count, own.counts[static_cast<std::size_t>(e)], fmt::format("the count of expert {}", first + e));
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const int rank = w.heap().rank;
    const LowLatencyScratch scratch = memory(w).scratch();
    return low_latency_return(w, layout_, batches_.local_experts(rank), memory(w).results.data(), scratch) &&
           low_latency_collect(w, layout_, input(call, rank), batches_.placement(), true, {}, out);
  }

 private:
  /// Checks a packed row and lays the expert's result for it down.
  template <class W>
  void check_row(W& w, int call, int source, int pair, std::size_t row, int expert) {
    LowLatencyMemory& own = memory(w);
    const int token = pair / topk();
    const std::string what = fmt::format("{} for expert {}", row_name(source, token), expert);
    expect_bytes(w, batches_.row(call, source, token), own.rows.data() + row * layout_.wire.row_bytes(), what);
    expect_equal(w, pair, own.origins[row].pair, "the origin of " + what);
    expect_bytes(w, std::vector<float>{input(call, source).weights[pair]}, &own.weights[row], "the weight of " + what);
    put(own.results, row, to_bf16s(batches_.expert_result(call, source, token, expert)));
  }
};

}  // namespace heddle::explorer
