#pragma once

#include "exchange/gather/tagged.hpp"
#include "explorer/trips/trip.hpp"

namespace heddle::explorer {

enum class Gathering : std::uint8_t { padded, uneven, zero_filled };

struct GatherMemory {
  GatherMemory(const Batches& batches, const GatherLayout& layout)
      : counts(room<std::int32_t>(static_cast<std::size_t>(layout.shape.ranks))),
        local_ids(room<std::int32_t>(layout.all_rows() * static_cast<std::size_t>(layout.shape.topk))),
        weights(room<float>(local_ids.size())),
        zeros(layout.record_bytes()),
        sums(layout.record_bytes() * static_cast<std::size_t>(batches.problem().workers)),
        results(room<bf16>(layout.all_rows() * static_cast<std::size_t>(layout.wire.hidden))) {}
  ArrivedRouting routing(int topk) { return {topk, local_ids.data(), weights.data()}; }
  std::vector<std::int32_t> counts, local_ids;
  std::vector<float> weights;
  std::vector<std::byte> zeros, sums;
  std::vector<bf16> results;
};

template <Gathering gathering>
class GatherTrip : public Trip<GatherLayout, GatherMemory> {
 public:
  static constexpr const char* name = gathering == Gathering::padded   ? "gather padded"
                                      : gathering == Gathering::uneven ? "gather uneven"
                                                                       : "gather zero-filled";
  explicit GatherTrip(const Batches& batches) : Trip(batches) { place(); }

  template <class W>
  bool dispatch(W& w, int call) {
    GatherMemory& own = memory(w);
    const SendInput sent = input(call, w.heap().rank);
    if (gathering != Gathering::padded && gather_exchange_counts(w, layout_, sent.tokens, own.counts.data()) == nullptr) {
      return false;
    }
    const std::size_t first = first_row(call, w.heap().rank);
    if (gathering == Gathering::zero_filled) {
      std::byte* sum = own.sums.data() + layout_.record_bytes() * static_cast<std::size_t>(w.index());
      if (!gather_all_reduce(w, layout_, rows(call), first, sent, own.zeros.data(), sum)) return false;
    } else if (!gather_send(w, layout_, first, sent) || gather_hear(w, layout_, own.counts.data()) == nullptr) {
      return false;
    }
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      for (int token = w.index(); token < input(call, s).tokens; token += w.count()) {
        const std::size_t row = first_row(call, s) + static_cast<std::size_t>(token);
        const auto* record = w.heap().template mine<std::byte>(layout_.record(row));
        take_routing(w, own.routing(topk()), row, record + layout_.wire.row_bytes(), batches_.placement());
      }
    }
    return true;
  }

  template <class W>
  void experts(W& w, int call) {
    GatherMemory& own = memory(w);
    std::fill(own.results.begin(), own.results.end(), bf16{});
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      const int tokens = input(call, s).tokens;
      expect_equal(w, tokens, own.counts[static_cast<std::size_t>(s)], fmt::format("the count from rank {}", s));
      for (int token = 0; token < tokens; ++token) {
        const std::size_t row = first_row(call, s) + static_cast<std::size_t>(token);
        const auto bytes = fetch(w, w.heap().template mine<std::byte>(layout_.record(row)), layout_.wire.row_bytes());
        expect_bytes(w, batches_.row(call, s, token), bytes.data(), row_name(s, token));
        check_routing(w, call, s, token, row, own.routing(topk()));
        put(own.results, row, batches_.partial_sum(call, s, token, w.heap().rank));
      }
    }
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const int rank = w.heap().rank;
    const int tokens = input(call, rank).tokens;
    return gather_offer(w, layout_, static_cast<int>(rows(call)), memory(w).results.data()) &&
           gather_pull(w, layout_, first_row(call, rank), tokens, {}, out);
  }

 private:
  std::size_t first_row(int call, int rank) const {
    return static_cast<std::size_t>(gathering == Gathering::padded ? rank * batches_.largest(call)
                                                                   : batches_.tokens_before(call, rank));
  }
  std::size_t rows(int call) const { return first_row(call, layout_.shape.ranks); }
};

/// Rows, and the sums on their way home, as words with the flag beside the data.
class TaggedGatherTrip : public GatherTrip<Gathering::padded> {
 public:
  static constexpr const char* name = "gather tagged";
  explicit TaggedGatherTrip(const Batches& batches) : GatherTrip(batches) {
    tagged_.tokens = layout_.shape.cap;
    tagged_.dispatch = layout_.areas.end;
    tagged_.combine = align_up(tagged_.dispatch + tagged_.dispatch_bytes(layout_), 128);
    layout_.areas.end = align_up(tagged_.combine + tagged_.combine_bytes(layout_), 128);
  }

  template <class W>
  bool dispatch(W& w, int call) {
    GatherMemory& own = memory(w);
    const SendInput sent = input(call, w.heap().rank);
    const int block = batches_.largest(call);
    return gather_send_tagged(w, layout_, tagged_, block, sent) &&
           gather_take_tagged(w, layout_, tagged_, block, sent, batches_.placement(), own.counts.data(), own.routing(topk()));
  }

  template <class W>
  bool combine(W& w, int call, bf16* out) {
    GatherMemory& own = memory(w);
    const int tokens = input(call, w.heap().rank).tokens;
    return gather_return_tagged(w, layout_, tagged_, batches_.largest(call), own.counts.data(), own.results.data()) &&
           gather_collect_tagged(w, layout_, tagged_, tokens, {}, out);
  }

 private:
  GatherTagged tagged_;
};

/// Tensor-parallel attention: every rank has all tokens, nothing is sent, and the sums are an all-reduce.
class TensorParallelTrip : public Trip<GatherLayout, GatherMemory> {
 public:
  static constexpr const char* name = "gather under tensor-parallel attention";
  explicit TensorParallelTrip(const Batches& batches) : Trip(batches) { place(); }
  void begin() {
    Trip::begin();
    sums_.assign(ranks_.size(), room<bf16>(layout_.all_rows() * static_cast<std::size_t>(hidden())));
    outputs_ = sums_;
  }

  template <class W>
  bool dispatch(W& w, int call) {
    return gather_exchange_counts(w, layout_, input(call, w.heap().rank).tokens, memory(w).counts.data()) != nullptr;
  }

  template <class W>
  void experts(W& w, int call) {
    for (int s = 0; s < layout_.shape.ranks; ++s) {
      for (int token = 0; token < input(call, s).tokens; ++token) {
        const int row = batches_.tokens_before(call, s) + token;
        put(memory(w).results, static_cast<std::size_t>(row), batches_.partial_sum(call, s, token, w.heap().rank));
      }
    }
  }

  /// Each rank sums a slice of all rows; all of them come back, and this rank's tokens are `out`.
  template <class W>
  bool combine(W& w, int call, bf16* out) {
    const int rank = w.heap().rank;
    const int all = batches_.all_tokens(call);
    const auto first = static_cast<std::size_t>(all * rank / layout_.shape.ranks);
    const int rows = all * (rank + 1) / layout_.shape.ranks - static_cast<int>(first);
    bf16* sums = sums_[static_cast<std::size_t>(rank)].data();
    bf16* outputs = outputs_[static_cast<std::size_t>(rank)].data();
    const AllGatherLayout shared{layout_.shape, hidden(), layout_.areas};
    if (!gather_offer(w, layout_, all, memory(w).results.data()) || !gather_pull(w, layout_, first, rows, {}, sums) ||
        !w.team_barrier() || !all_gather_rows(w, shared, static_cast<int>(first), rows, all, sums, outputs) || !w.team_barrier()) {
      return false;
    }
    const auto values = static_cast<std::size_t>(hidden());
    const auto own = static_cast<std::size_t>(batches_.tokens_before(call, rank));
    if (w.index() == 0) std::copy_n(outputs + own * values, static_cast<std::size_t>(input(call, rank).tokens) * values, out);
    return true;
  }

 private:
  std::vector<std::vector<bf16>> sums_, outputs_;
};

}  // namespace heddle::explorer
