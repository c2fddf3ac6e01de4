// The fused layer, the protocol of dispatch (docs/protocols/mega.md): announce, count, pull. Here too: the call and its row blocks,
// which every role reads.
#pragma once

#include "exchange/sending.hpp"
#include "mega/layout.hpp"
#include "mega/shares.hpp"

namespace heddle {

/// Ordinary memory of one rank, shared by its workers; dispatch writes it before it says that rows are counted.
struct MegaScratch {
  Numbering sent;                   ///< numbers [tokens, topk]: of each pair among this sender's of its expert; totals [experts]
  std::int32_t* arrived = nullptr;  ///< [local experts (at least 1), ranks]: rows from each source
  std::int32_t* rows = nullptr;     ///< [local experts (at least 1)], and where their row blocks end: see MegaBlocks
  std::int32_t* ends = nullptr;
  std::int32_t* row_ends = nullptr;  ///< [local experts (at least 1)]: rows of this expert and those before it
};

/// One call on one rank.
struct MegaCall {
  MegaLayout layout;
  SendInput input;
  PlacementView placement;
  int local_experts = 0;
  MegaScratch scratch;

  HEDDLE_HOST_DEVICE MegaBlocks blocks() const { return {local_experts, layout.block_rows, scratch.rows, scratch.ends}; }
};

/// A row block: whose rows, how many, and where they lie.
struct MegaBlock {
  int expert = 0;
  int rows = 0;
  RingPlace place;
  std::size_t ring_row = 0;  ///< of the first
};

HEDDLE_HOST_DEVICE inline MegaBlock block_of(const MegaCall& call, int block) {
  const MegaBlocks blocks = call.blocks();
  const int expert = blocks.expert_of(block);
  const RingPlace place = ring_place(block, call.layout.ring_blocks);
  return {expert, blocks.rows_of(expert, block), place,
          static_cast<std::size_t>(place.block) * static_cast<std::size_t>(call.layout.block_rows)};
}

/// The expert of an own token's choice, -1 where it has none. On GPUs ids are checked while others already look at them.
HEDDLE_HOST_DEVICE inline std::int32_t expert_of(const MegaCall& call, int rank, int token, int choice) {
  const int given = call.layout.given_experts();
  if (choice == call.input.topk) return given + rank;  // the extra one
  const std::int32_t id = call.input.ids[token * call.input.topk + choice];
  return id < given ? id : -1;
}
HEDDLE_HOST_DEVICE inline std::int32_t expert_of(const MegaCall& call, int rank, int pair) {
  if (!call.layout.extra_expert) return call.input.ids[pair] < call.layout.shape.experts ? call.input.ids[pair] : -1;
  return expert_of(call, rank, pair / call.layout.shape.topk, pair % call.layout.shape.topk);
}

/// A name of a word of this rank's own, in errors.
template <Worker W>
HEDDLE_PROTOCOL WordName own_word(const W& w, WordKind kind, int index) {
  return {kind, w.heap().rank, index};
}

/// The counters that workers add to begin this call at 0. Nobody adds to one before it has heard that rows are counted.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_start_counts(W& w, const MegaLayout& layout) {
  const HeapView heap = w.heap();
  w.spread(layout.ring_blocks + 1, 2, [&](int i, int which) {
    const bool ring = i < layout.ring_blocks;
    const std::size_t first = ring ? layout.filled_word(i) : layout.claim_word();
    const std::size_t second = ring ? layout.freed_word(i) : layout.finished_word();
    w.start_count(heap.template mine<Word>(which == 0 ? first : second));
  });
}

/// A token's choices and their weights into the input region.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_send_routing(W& w, const MegaCall& call, int token) {
  const MegaLayout& layout = call.layout;
  const HeapView heap = w.heap();
  auto* to = heap.template mine<std::byte>(layout.routing(token));
  if (!layout.extra_expert) {
    send_routing(
        w, 1, [&](int) { return to; }, call.input, token);
    return;
  }
  const int topk = layout.shape.topk;
  auto* ids = reinterpret_cast<std::int32_t*>(to);
  auto* weights = reinterpret_cast<float*>(to) + topk;
  const float* given = call.input.weights + token * call.input.topk;
  write_each(
      w, topk, [&](int choice) { return ids + choice; }, [&](int choice) { return expert_of(call, heap.rank, token, choice); });
  write_each(
      w, topk, [&](int choice) { return weights + choice; },
      [&](int choice) { return choice == call.input.topk ? 1.0f : given[choice]; });
}

/// Lays a part of an own token into the input region; with the last one its routing, and tells the ranks of its experts which pairs
/// are theirs. number_of(pair): among the own pairs for its expert.
template <CountingWorker W, class NumberOf>
HEDDLE_PROTOCOL void mega_lay_down(W& w, const MegaCall& call, int token, const RowPart& part, NumberOf number_of) {
  const MegaLayout& layout = call.layout;
  const SendInput& input = call.input;
  const HeapView heap = w.heap();
  const auto row = [&](int) { return heap.template mine<std::byte>(layout.row(token)); };
  const bf16* values = input.hidden + static_cast<std::size_t>(token) * static_cast<std::size_t>(layout.wire.hidden);
  send_row(w, 1, row, values, layout.wire, part);
  if (!part.last()) return;
  mega_send_routing(w, call, token);
  const int topk = layout.shape.topk;
  const auto index = [&](int choice) -> std::int32_t* {
    const std::int32_t expert = expert_of(call, heap.rank, token, choice);
    const int d = call.placement.rank_of_choice(expert);
    if (d < 0 || !w.live(d)) return nullptr;
    const int number = number_of(token * topk + choice);
    if (number >= layout.shape.cap) return nullptr;
    return heap.template at<std::int32_t>(d, layout.index(call.placement.local_index[expert], heap.rank, number));
  };
  write_each(w, topk, index, [&](int choice) { return token * topk + choice; });
}

/// All own tokens by squads, each a share of its own: none waits for another one.
template <CountingWorker W, class ExpertOf>
HEDDLE_PROTOCOL void mega_lay_down_shares(W& w, const MegaCall& call, ExpertOf expert_of_pair) {
  const int tokens = call.input.tokens;
  const int topk = call.layout.shape.topk;
  const int together = share_pairs / topk;
  const TokenShare share = share_of(tokens, w.squad(), w.squads());
  const int bits = w.part_bits(tokens, call.layout.wire.hidden);
  ShareNumbers numbers(w, call.layout.shape.experts, expert_of_pair);
  numbers.begin(share.begin * topk);
  for (int first = share.begin; first < share.end; first += together) {
    const int n = share.end - first < together ? share.end - first : together;
    numbers.number(first * topk, n * topk);
    for (int item = w.squad_index(); item < n << bits; item += w.squad_count())
      mega_lay_down(w, call, first + row_of(item, bits), part_of(item, bits), [&](int pair) { return numbers.of(pair); });
    numbers.finish();
  }
  if (w.squad() == w.squads() - 1 && w.squad_index() == 0) write_counts_alone(w, call.layout, call.placement, numbers.counts());
}

/// Lays the own tokens into the input region and tells the ranks of their experts which pairs are theirs.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_lay_down_all(W& w, const MegaCall& call) {
  const MegaLayout& layout = call.layout;
  const SendInput& input = call.input;
  const int pairs = input.tokens * layout.shape.topk;
  const int experts = layout.shape.experts;
  const int chunk = kinds_chunk(w, Crew::squad, pairs);
  Numbering sent = call.scratch.sent;
  const Crew crew = crew_for(w, pairs <= few_kinds, pairs, experts, (pairs + chunk - 1) / chunk, sent);
  const int rank = w.heap().rank;
  const auto expert_of_pair = [&](int pair) { return expert_of(call, rank, pair); };
  if constexpr (W::is_warp) {
    if (crew == Crew::team) {
      mega_lay_down_shares(w, call, expert_of_pair);
      return true;
    }
  }
  if (!number_kinds(w, crew, pairs, experts, expert_of_pair, sent)) return false;
  write_counts(w, layout, call.placement, sent.totals);
  const int bits = w.part_bits(input.tokens, layout.wire.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count())
    mega_lay_down(w, call, row_of(item, bits), part_of(item, bits), [&](int pair) { return sent.numbers[pair]; });
  return true;
}

/// Where results are added: the own tokens' sums begin at 0. Nobody adds before it has heard this rank's announcement.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_clear_sums(W& w, const MegaCall& call) {
  const MegaLayout& layout = call.layout;
  if (!layout.adds) return;
  for (int token = w.index(); token < call.input.tokens; token += w.count())
    w.clear(w.heap().template mine<std::byte>(layout.sum(token)), layout.plain().row_bytes());
}

/// Begins the counters and tells every live rank what comes from this one.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_announce(W& w, const MegaCall& call) {
  if (!w.begin()) return false;
  mega_start_counts(w, call.layout);
  mega_clear_sums(w, call);
  if (!mega_lay_down_all(w, call)) return false;
  tell_together(
      w, [&](int peer) { return call.layout.announced_word(peer); }, [](int) { return 1; });
  return true;
}

/// Whether a source can have announced so many rows for an expert.
HEDDLE_HOST_DEVICE inline bool is_row_count(const MegaLayout& layout, int count) { return count >= 0 && count <= layout.shape.cap; }

/// Names the first announced count that cannot be, of which there is one.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_refuse_counts(W& w, const MegaCall& call) {
  const MegaLayout& layout = call.layout;
  const int ranks = w.heap().ranks;
  int region = 0;
  while (is_row_count(layout, call.scratch.arrived[region])) ++region;
  return w.fail({WordKind::mega_row_count, region % ranks, region / ranks}, static_cast<std::uint64_t>(layout.shape.cap),
                static_cast<std::uint32_t>(call.scratch.arrived[region]));
}

/// One worker takes the announced counts and cuts each expert's rows into blocks; false if a count cannot be.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_take_counts(W& w, const MegaCall& call) {
  const MegaLayout& layout = call.layout;
  const HeapView heap = w.heap();
  const int ranks = heap.ranks;
  const MegaScratch& to = call.scratch;
  bool all_can_be = true;
  w.lanes(call.local_experts * ranks, [&](int region) {
    const int s = region % ranks;
    const auto* count = heap.template mine<const std::int32_t>(layout.count(region / ranks, s));
    const std::int32_t arrived = w.live(s) ? w.load(count) : 0;
    to.arrived[region] = arrived;
    all_can_be = all_can_be && is_row_count(layout, arrived);
  });
  if (!w.in_all_lanes(all_can_be)) return mega_refuse_counts(w, call);
  w.lanes(call.local_experts, [&](int e) {
    int rows = 0;
    for (int s = 0; s < ranks; ++s) rows += to.arrived[e * ranks + s];
    to.rows[e] = to.row_ends[e] = rows;
    to.ends[e] = parts_of(rows, layout.block_rows);
  });
  w.prefix_sums(call.local_experts, to.ends, 1);  // where an expert's blocks begin, and its rows
  w.prefix_sums(call.local_experts, to.row_ends, 1);
  w.lanes(call.local_experts, [&](int e) {
    to.ends[e] += parts_of(to.rows[e], layout.block_rows);
    to.row_ends[e] += to.rows[e];
  });
  return true;
}

/// All workers of the rank, whatever their role: waits until rows are counted.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_await_counts(W& w, const MegaLayout& layout) {
  return w.acquire_own(w.heap().template mine<const Word>(layout.counted_word()), own_word(w, WordKind::mega_counted, -1), 1);
}

/// Waits for every live rank's announcement, after which all tables are complete.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_count(W& w, const MegaCall& call) {
  if (!hear_all(
          w, [&](int peer) { return call.layout.announced_word(peer); }, WordKind::mega_announced))
    return false;
  if (w.index() == 0) {
    if (!mega_take_counts(w, call)) return false;
    publish_own(w, w.heap().template mine<Word>(call.layout.counted_word()), 1);
  }
  return mega_await_counts(w, call.layout);
}

/// The same where workers count for themselves alone (a CTA's dispatch warp does): one waits until every live rank has announced,
/// and of its own rank all workers, so that the counters have begun, too.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_hear(W& w, const MegaLayout& layout) {
  const HeapView heap = w.heap();
  return acquire_each(
      w, heap.ranks, [&](int s) { return w.live(s) ? heap.template mine<const Word>(layout.announced_word(s)) : nullptr; },
      [&](int s) {
        return s == heap.rank ? WordName{WordKind::team, s, -1} : WordName{WordKind::mega_announced, s, -1};
      });
}

/// One waits until the own rank's input region is complete.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_await_input(W& w, const MegaLayout& layout) {
  const HeapView heap = w.heap();
  return acquire_each(
      w, 1, [&](int) { return heap.template mine<const Word>(layout.announced_word(heap.rank)); },
      [&](int) {
        return WordName{WordKind::team, heap.rank, -1};
      });
}

/// A row on its way: its place in the ring, and of its block's rows for how many it stands.
struct MegaArrival {
  RingPlace place;
  std::int32_t ring_row = 0;
  std::uint32_t counts = 0;
};
/// And where it comes from, with its weight.
struct MegaPulled {
  MegaArrival to;
  MegaOrigin origin;
  std::int32_t token = 0;  ///< of the origin
  float weight = 0;
};

/// Which expert row `number` of all that come to this rank is for, and its number there.
struct MegaExpertRow {
  int expert = 0;
  int row = 0;
};
HEDDLE_HOST_DEVICE inline MegaExpertRow expert_row(const MegaCall& call, int number) {
  const int expert = find_expert(call.scratch.row_ends, call.local_experts, number);
  return {expert, number - (expert == 0 ? 0 : call.scratch.row_ends[expert - 1])};
}
HEDDLE_HOST_DEVICE inline MegaArrival arrival_of(const MegaCall& call, const MegaExpertRow& own) {
  const int block_rows = call.layout.block_rows;
  const int block = own.row / block_rows;
  const int in_block = own.row - block * block_rows;
  const RingPlace place = ring_place(call.blocks().begin(own.expert) + block, call.layout.ring_blocks);
  // A full counter always means that nothing more comes: the expert's last row stands for those that its block does not have.
  const bool last = own.row + 1 == call.scratch.rows[own.expert];
  return {place, place.block * block_rows + in_block, static_cast<std::uint32_t>(last ? block_rows - in_block : 1)};
}
template <CountingWorker W>
HEDDLE_PROTOCOL MegaPulled find_pulled(W& w, const MegaCall& call, int number) {
  const HeapView heap = w.heap();
  const MegaExpertRow own = expert_row(call, number);
  const auto counts = [&](int s) { return call.scratch.arrived[own.expert * heap.ranks + s]; };
  const RowSource source = source_of_row(heap.ranks, counts, own.row);
  const std::int32_t pair =
      w.load(heap.template mine<const std::int32_t>(call.layout.index(own.expert, source.rank, source.number)));
  const float weight = w.load(heap.template at<const float>(source.rank, call.layout.weight(pair)));
  return {arrival_of(call, own), {source.rank, pair}, pair / call.layout.shape.topk, weight};
}

/// Waits until a row's place in the ring is free.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_await_place(W& w, const MegaLayout& layout, const RingPlace& place) {
  if (place.generation == 0) return true;
  const auto least = static_cast<std::uint32_t>(place.generation * layout.gemm2_tasks());
  return w.acquire_own(w.heap().template mine<const Word>(layout.freed_word(place.block)),
                       own_word(w, WordKind::mega_freed, place.block), least);
}

/// Fetches the `n` rows with numbers first + i * w.count(). What is to be known of them is looked up together, and they are told of
/// together, but none is kept back while another one's place is waited for: that may hang on it.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_pull_rows(W& w, const MegaCall& call, int first, int n) {
  constexpr int told_together = 8;
  const MegaLayout& layout = call.layout;
  const HeapView heap = w.heap();
  const auto number = [&](int i) { return first + i * w.count(); };
  const auto pulled = side_by_side(w, n, [&](int i) { return find_pulled(w, call, number(i)); });
  const auto arrival = [&](int i) {  // a lane that is asked for its own row knows it
    if constexpr (W::is_warp) {
      return pulled.mine.to;
    } else {
      return arrival_of(call, expert_row(call, number(i)));
    }
  };
  const auto tell = [&](int begin, int end) {
    w.complete_all();  // whether there is something to tell or not: whoever waits next keeps nothing back
    if (begin == end) return;
    add_each(
        w, begin, end, [&](int i) { return heap.template mine<Word>(layout.filled_word(arrival(i).place.block)); },
        [&](int i) { return arrival(i).counts; });
  };
  const Stretch inputs = layout.input_rows();
  const Stretch rows = layout.arrived_rows();
  const Stretch weights = layout.row_weights();
  const Stretch origins = layout.origins();
  const RowFormat wire = layout.wire;
  int told = 0;
  for (int i = 0; i < n; ++i) {
    const MegaPulled from = pulled(i);
    if (from.to.place.generation > 0) {
      tell(told, i);
      told = i;
    }
    if (!mega_await_place(w, layout, from.to.place)) return false;
    const auto place = [&](int) { return heap.template mine<std::byte>(rows.at(from.to.ring_row)); };
    copy_row(w, 1, place, heap.template at<std::byte>(from.origin.rank, inputs.at(from.token)), wire);
    w.write(heap.template mine<float>(weights.at(from.to.ring_row)), from.weight);
    w.write(heap.template mine<MegaOrigin>(origins.at(from.to.ring_row)), from.origin);
    if (i + 1 - told < told_together && i + 1 < n) continue;
    tell(told, i + 1);
    told = i + 1;
  }
  return true;
}

/// Fetches the rows of all local experts, in the order of their blocks, dealt over the workers.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_pull(W& w, const MegaCall& call) {
  constexpr int looked_up_together = 32;
  const int rows = call.local_experts == 0 ? 0 : call.scratch.row_ends[call.local_experts - 1];
  for (int first = w.index(); first < rows; first += looked_up_together * w.count()) {
    const int left = (rows - first + w.count() - 1) / w.count();
    if (!mega_pull_rows(w, call, first, left < looked_up_together ? left : looked_up_together)) return false;
  }
  return true;
}

/// What a dispatcher does, in this order.
enum class MegaStep : std::uint8_t { announce, count, fetch };

/// run(step, work) calls work() and gives what it gives: whoever looks on knows which step it is.
template <CountingWorker W, class Run>
HEDDLE_PROTOCOL bool mega_dispatch(W& w, const MegaCall& call, const Run& run) {
  return run(MegaStep::announce, [&] { return mega_announce(w, call); }) &&
         run(MegaStep::count, [&] { return mega_count(w, call); }) && run(MegaStep::fetch, [&] { return mega_pull(w, call); });
}
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_dispatch(W& w, const MegaCall& call) {
  return mega_dispatch(w, call, [](MegaStep, const auto& work) { return work(); });
}

}  // namespace heddle
