// The fused layer, the protocol (docs/protocols/mega.md), by role. Dispatch: see dispatch.hpp. Tasks: claim one, wait for what it
// reads, tell what it made. Combine: finish, sum. Each role has workers of its own, and none of them waits for its own role's end.
#pragma once

#include "mega/dispatch.hpp"

namespace heddle {

// ---- tasks ----------------------------------------------------------------------------------------------------------------

/// The next place in the rank's line of tasks; beyond its end when all are taken.
template <CountingWorker W>
HEDDLE_PROTOCOL int mega_claim(W& w, const MegaLayout& layout) {
  return static_cast<int>(w.add(w.heap().template mine<Word>(layout.claim_word()), 1));
}

/// The same without waiting for the answer: w.answer() has it.
template <CountingWorker W>
HEDDLE_PROTOCOL Word mega_ask_next(W& w, const MegaLayout& layout) {
  return w.ask_next(w.heap().template mine<Word>(layout.claim_word()));
}

/// Before GEMM 1: the block's rows are there, and what was in the ring before them has been read.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_await_rows(W& w, const MegaLayout& layout, const MegaBlock& block) {
  return w.acquire_own(w.heap().template mine<const Word>(layout.filled_word(block.place.block)),
                       own_word(w, WordKind::mega_filled, block.place.block),
                       static_cast<std::uint32_t>((block.place.generation + 1) * layout.block_rows));
}

/// After GEMM 1: the activations of a step are stored.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_note_step(W& w, const MegaLayout& layout, const MegaBlock& block, int step) {
  w.complete_all();
  publish_own(w, w.heap().template mine<Word>(layout.step_word(block.place.block, step)),
              static_cast<std::uint32_t>(block.place.generation + 1));
}

/// Before step `step` of GEMM 2: how many steps are there then, those before it included; 0: gave up.
template <CountingWorker W>
HEDDLE_PROTOCOL int mega_await_steps(W& w, const MegaLayout& layout, const MegaBlock& block, int step) {
  const HeapView heap = w.heap();
  const int run = acquire_own_run(
      w, layout.gemm1_tasks() - step,
      [&](int i) { return heap.template mine<const Word>(layout.step_word(block.place.block, step + i)); },
      own_word(w, WordKind::mega_step, block.place.block), static_cast<std::uint32_t>(block.place.generation + 1));
  return run == 0 ? 0 : step + run;
}

/// Where the results of a pair go: its slot, or the sum of its token.
HEDDLE_HOST_DEVICE inline std::byte* home_of(const HeapView& heap, const MegaLayout& layout, const MegaOrigin& origin) {
  return heap.at<std::byte>(origin.rank, layout.adds ? layout.sum(origin.pair / layout.shape.topk) : layout.slot(origin.pair));
}

/// `columns` results from column `first` on, into a row of that format. Both are whole groups, so that what is written is what a
/// row quantised as a whole would have there.
template <CountingWorker W>
HEDDLE_PROTOCOL void send_columns(W& w, std::byte* row, const bf16* results, const RowFormat& format, int first, int columns) {
  const RowFormat part = format.part(columns);
  if (format.wire == Wire::bf16) {
    w.copy_bytes(row + format.value_at(first), results, part.value_bytes());
    return;
  }
  std::byte* staged = w.staging(part);
  w.complete(w.quantise_row(staged, results, part));
  w.copy_bytes(row + format.value_at(first), staged, part.value_bytes());
  w.copy_bytes(row + format.scale_at(first), staged + part.scale_offset(), part.scale_bytes());
}

/// `columns` results of row `row` of a block, from column `first` on, to where their pair's go.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_push(W& w, const MegaLayout& layout, const MegaBlock& block, int row, const bf16* results, int first,
                               int columns) {
  const HeapView heap = w.heap();
  const MegaOrigin origin =
      w.read(heap.template mine<const MegaOrigin>(layout.origin(block.ring_row + static_cast<std::size_t>(row))));
  std::byte* home = home_of(heap, layout, origin);
  if (layout.adds) {
    w.add_values(reinterpret_cast<bf16*>(home) + first, results, columns);
  } else {
    send_columns(w, home, results, layout.returned, first, columns);
  }
}

/// After GEMM 2: a task needs its block's place no more.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_note_pushed(W& w, const MegaLayout& layout, const MegaBlock& block) {
  w.complete_all();
  const HeapView heap = w.heap();
  add_each(
      w, 0, 1, [&](int) { return heap.template mine<Word>(layout.freed_word(block.place.block)); }, [](int) { return 1u; });
}

/// The same two for the shared expert, whose activations have places of their own.
template <CountingWorker W>
HEDDLE_PROTOCOL void mega_note_shared_step(W& w, const MegaLayout& layout, int block, int step) {
  w.complete_all();
  publish_own(w, w.heap().template mine<Word>(layout.shared_step_word(block, step)), 1);
}
template <CountingWorker W>
HEDDLE_PROTOCOL int mega_await_shared_steps(W& w, const MegaLayout& layout, int block, int step) {
  const HeapView heap = w.heap();
  const int run = acquire_own_run(
      w, layout.shared.steps() - step,
      [&](int i) { return heap.template mine<const Word>(layout.shared_step_word(block, step + i)); },
      own_word(w, WordKind::mega_shared_step, block), 1);
  return run == 0 ? 0 : step + run;
}

// ---- combine --------------------------------------------------------------------------------------------------------------

/// A worker that has found no more tasks has finished its own. The last one of the rank tells everybody that results are there, and
/// is told so.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_finish(W& w, const MegaLayout& layout) {
  w.complete_all();
  const std::uint32_t before = w.add(w.heap().template mine<Word>(layout.finished_word()), 1);
  if (static_cast<int>(before) + 1 < w.count()) return false;
  tell_at_once(
      w, [&](int peer) { return layout.ready_word(peer); }, [](int) { return 1; }, w.index());
  return true;
}

/// Waits until the ranks rank_of(i), i < n (-1: none), have pushed all their results; for the own rank as long as for fellow
/// workers, which are what is missing then.
template <CountingWorker W, class RankOf>
HEDDLE_PROTOCOL bool mega_await_results(W& w, const MegaLayout& layout, int n, RankOf rank_of) {
  const HeapView heap = w.heap();
  const auto word = [&](int rank) { return rank < 0 ? nullptr : heap.template mine<const Word>(layout.ready_word(rank)); };
  const auto name = [](int rank) { return WordName{WordKind::mega_ready, rank, -1}; };
  if constexpr (W::is_warp) {
    return acquire_each(
        w, n, [&](int i) { return word(rank_of(i)); }, [&](int i) { return name(rank_of(i)); });
  } else {
    for (int i = 0; i < n; ++i) {
      const int rank = rank_of(i);
      std::uint32_t value = 0;
      if (rank < 0) continue;
      if (!(rank == heap.rank ? w.acquire_own(word(rank), name(rank), 1) : w.acquire(word(rank), name(rank), value))) return false;
    }
    return true;
  }
}

/// out [tokens, H] = each token's slots in choice order, or the sum that they were added to, then the shared expert's result times
/// its factor, rounded once. Where the shared expert does not run inside, `shared` has its results, if there are any. A token waits
/// for the ranks of its experts alone. In the end every live rank has been heard: none can still read this one's input or push into
/// its slots, so the call is over.
template <CountingWorker W>
HEDDLE_PROTOCOL bool mega_sum(W& w, const MegaCall& call, SharedRows shared, bf16* out) {
  const MegaLayout& layout = call.layout;
  const SendInput& input = call.input;
  const HeapView heap = w.heap();
  const int topk = layout.shape.topk;
  const int bits = w.part_bits(input.tokens, layout.returned.hidden);
  for (int item = w.index(); item < input.tokens << bits; item += w.count()) {
    const int token = row_of(item, bits);
    const auto rank_of = [&](int choice) {
      const int rank = call.placement.rank_of_choice(expert_of(call, heap.rank, token, choice));
      return rank >= 0 && w.live(rank) ? rank : -1;
    };
    const auto ranks = side_by_side(w, topk, rank_of);                                  // looked up before anything is waited for
    const auto own_or_of = [&](int i) { return i == 0 ? heap.rank : rank_of(i - 1); };  // the own rank's are the shared expert's
    if (!mega_await_results(w, layout, topk + 1, own_or_of)) return false;
    const Stretch slots = layout.adds ? layout.sums(token) : layout.slots(token);
    const auto term = [&](int choice) {
      if (!layout.adds && ranks(choice) < 0) return SumTerm{};
      return SumTerm{heap.template mine<std::byte>(slots.at(choice)), 1.0f};
    };
    LastTerm last = shared.of(static_cast<std::size_t>(token), static_cast<std::size_t>(layout.returned.hidden));
    if (layout.has_shared) {
      last.row = heap.template mine<const bf16>(layout.shared_slot(token));
      last.factor = shared.factors == nullptr ? 1.0f : shared.factors[token];
    }
    bf16* row = out + static_cast<std::size_t>(token) * static_cast<std::size_t>(layout.returned.hidden);
    w.reduce_rows(row, layout.adds ? 1 : topk, term, SumFormat{layout.returned, false}, last, part_of(item, bits));
  }
  for (int first = w.index(); first < heap.ranks; first += w.count()) {
    if (!mega_await_results(w, layout, 1, [&](int) { return w.live(first) ? first : -1; })) return false;
  }
  return true;
}

}  // namespace heddle
