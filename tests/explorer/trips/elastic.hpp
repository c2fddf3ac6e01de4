#pragma once

#include <numeric>

#include "exchange/elastic/protocol.hpp"
#include "explorer/trips/trip.hpp"

namespace heddle::explorer {

struct ElasticMemory {
  static constexpr int alignment = 2;
  ElasticMemory(const Batches&, const ElasticLayout& layout)
      : topk(layout.shape.topk),
        slots(room<std::int32_t>(static_cast<std::size_t>(layout.shape.cap * layout.shape.ranks))),
        sent(room<std::int32_t>(static_cast<std::size_t>(layout.shape.ranks))),
        before(chunks(layout.shape.cap, layout.shape.ranks)),
        arrived(sent),
        home_tokens(room<std::int32_t>(layout.region_rows())),
        local_ids(room<std::int32_t>(layout.region_rows() * static_cast<std::size_t>(topk))),
        places(local_ids),
        begins(room<std::int32_t>(static_cast<std::size_t>(layout.shape.max_local_experts))),
        counts(begins),
        numbers(local_ids),
        before_experts(chunks(static_cast<int>(local_ids.size()), layout.shape.max_local_experts)),
        weights(local_ids.size()),
        row_weights(local_ids.size() + begins.size() * alignment),
        rows(row_weights.size() * layout.wire.row_bytes()),
        results(row_weights.size() * static_cast<std::size_t>(layout.wire.hidden)),
        sums(layout.region_rows() * static_cast<std::size_t>(layout.wire.hidden)) {}
  ElasticScratch scratch() { return {{slots.data(), sent.data(), before.data()}, arrived.data(), home_tokens.data(), routing()}; }
  ArrivedRouting routing() { return {topk, local_ids.data(), weights.data()}; }
  ExpertLayout by_expert(int local_experts) {
    return {local_experts, alignment,          0,           begins.data(),  counts.data(),
            places.data(), row_weights.data(), rows.data(), numbers.data(), before_experts.data()};
  }
  int topk;
  std::vector<std::int32_t> slots, sent, before, arrived, home_tokens, local_ids, places, begins, counts, numbers, before_experts;
  std::vector<float> weights, row_weights;
  std::vector<std::byte> rows;
  std::vector<bf16> results, sums;
};

/// With `expand` rows are laid out by expert, without it they stay in arrival order.
template <Reduce reduce, bool expand>
class ElasticTrip : public Trip<ElasticLayout, ElasticMemory> {
 public:
  static constexpr const char* name = reduce == Reduce::rank
                                          ? (expand ? "elastic expanded, reduced at the rank" : "elastic, reduced at the rank")
                                          : (expand ? "elastic expanded, reduced at home" : "elastic, reduced at home");
  explicit ElasticTrip(const Batches& batches) : Trip(batches) {
    layout_.reduce = reduce;
    place();
  }

  template <class W>
  bool dispatch(W& w, int call) {
    ElasticMemory& own = memory(w);
    const ElasticScratch scratch = own.scratch();
    const auto room_rows = static_cast<int>(layout_.region_rows());
    if (!elastic_send(w, layout_, input(call, w.heap().rank), batches_.placement(), scratch)) return false;
    const std::int32_t* arrived = elastic_receive(w, layout_, scratch);
    if (arrived == nullptr) return false;
    const int n = std::accumulate(arrived, arrived + layout_.shape.ranks, 0);
    if (!elastic_list(w, layout_, arrived, n, room_rows, batches_.placement(), scratch)) return false;
    if (expand) {
      return elastic_expand(w, layout_, arrived, n, batches_.placement(), scratch,
                            own.by_expert(batches_.local_experts(w.heap().rank)));
    }
    elastic_copy_out(w, layout_, arrived, n, own.rows.data());
    return true;
  }

  template <class W>
  void experts(W& w, int call) {
    ElasticMemory& own = memory(w);
    int i = 0;
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      const std::vector<int> tokens = batches_.tokens_to(call, s, w.heap().rank);
      expect_equal(w, static_cast<int>(tokens.size()), own.arrived[static_cast<std::size_t>(s)],
                   fmt::format("the count from rank {}", s));
      for (const int token : tokens) {
        expect_equal(w, token, own.home_tokens[static_cast<std::size_t>(i)], "the home of " + row_name(s, token));
        check_routing(w, call, s, token, static_cast<std::size_t>(i), own.routing());
        if (!expand) check_row(w, call, s, token, i);
        put(own.sums, static_cast<std::size_t>(i), batches_.partial_sum(call, s, token, w.heap().rank));
        for (int choice = 0; choice < topk(); ++choice) take_pair(w, call, s, token, i * topk() + choice);
        ++i;
      }
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    ElasticMemory& own = memory(w);
    ElasticResults results;
    results.summed = !expand && reduce == Reduce::rank;
    results.rows = results.summed ? own.sums.data() : own.results.data();
    results.places = expand ? own.places.data() : nullptr;
    results.weighted = true;
    results.sums = own.sums.data();
    return elastic_return(w, layout_, results, own.scratch()) &&
           elastic_collect(w, layout_, input(call, w.heap().rank), batches_.placement(), own.scratch(), true, {}, out);
  }

 private:
  template <class W>
  void check_row(W& w, int call, int source, int token, int place) {
    expect_bytes(w, batches_.row(call, source, token),
                 memory(w).rows.data() + static_cast<std::size_t>(place) * layout_.wire.row_bytes(), row_name(source, token));
  }
  /// One pair's row, if it has one, and what its expert makes of it.
  template <class W>
  void take_pair(W& w, int call, int source, int token, int pair) {
    ElasticMemory& own = memory(w);
    const auto at = static_cast<std::size_t>(pair);
    if (!expand) own.places[at] = own.local_ids[at] < 0 ? -1 : pair;
    if (own.local_ids[at] < 0) return;
    const std::int32_t place = own.places[at];
    if (expand) check_row(w, call, source, token, place);
    const int expert = batches_.first_expert(w.heap().rank) + own.local_ids[at];
    put(own.results, static_cast<std::size_t>(place), to_bf16s(batches_.expert_result(call, source, token, expert)));
  }
};

}  // namespace heddle::explorer
