// The verbs of a protocol. A protocol (who writes which word, with which order, who waits) is written
// once, as templates over a Worker: a thread on the host, a warp on a GPU, a scheduled coroutine in the
// schedule explorer. Protocols touch the heap through these verbs and in no other way.
//
// Verbs are called converged, with uniform arguments and results: on a GPU all lanes of the warp make
// the call, and run the code between calls alike. What stands between calls may therefore store a value
// to ordinary memory again and again, but never change one in place: that is what lanes() and once() are for.
// Those that can give up return false; the protocol then returns false at once, and every
// other wait of the group ends as well, because the abort word stands.
#pragma once

#include <concepts>
#include <cstdint>

#include "formats/row_format.hpp"
#include "heddle/group.hpp"
#include "signal/words.hpp"

/// Marks protocol templates: plain functions on the host, device functions for nvcc.
#if defined(__CUDACC__)
#define HEDDLE_PROTOCOL __device__
#else
#define HEDDLE_PROTOCOL
#endif

namespace heddle {

/// A copy that may still be under way; complete() waits for it.
struct Ticket {
  std::uint32_t number = 0;
};

/// One row of a sum: wire bytes and the weight it is multiplied with. A null row is skipped.
struct SumTerm {
  const std::byte* row = nullptr;
  float weight = 1.0f;
};

/// A row that comes as words with this call's tag (null: it is not waited for). `count`, unless null, is the word of an
/// announcement that tells how many rows come; this one is row `number` of them.
struct TaggedRow {
  const Word* words = nullptr;
  const Word* count = nullptr;
  int number = 0;
  WordName name;  ///< of its words, in errors
};
constexpr std::size_t tagged_bytes_a_word = 4;  ///< of data
/// What became of such a row: it is here, it does not come, or the wait gave up.
enum class Taken : std::uint8_t { here, none, gave_up };
/// An announced value has so many bits; above them squads say how many they are.
constexpr int announced_bits = 24;
HEDDLE_HOST_DEVICE constexpr int announced_value(std::uint32_t said) {
  return static_cast<int>(said & ((1u << announced_bits) - 1u));
}

/// How the rows of a sum are read: their format, and whether their weights apply (fmaf) or not (add).
struct SumFormat {
  RowFormat row;
  bool weighted = false;
};

/// What of a call a worker takes part in. The epoch of a call: the sending half of dispatch takes the next one and leaves it
/// in the header for the other parts; combine, whose workers look at nothing else, says that it is used up. So no worker
/// reads what another one of its launch writes.
enum class CallPart : std::uint8_t { dispatch_send, dispatch_receive, combine };

/// A share of a row for one of several workers: piece `index` of 2^bits, each a multiple of 512 values.
struct RowPart {
  int index = 0;
  int bits = 0;

  HEDDLE_HOST_DEVICE bool last() const { return index == (1 << bits) - 1; }
  /// Where this piece of n units begins; the next one's begin is its end.
  HEDDLE_HOST_DEVICE int begin(int n) const { return n * index >> bits; }
  HEDDLE_HOST_DEVICE int end(int n) const { return n * (index + 1) >> bits; }
};

/// Items are rows in 2^bits parts each.
HEDDLE_HOST_DEVICE inline int row_of(int item, int bits) { return item >> bits; }
HEDDLE_HOST_DEVICE inline RowPart part_of(int item, int bits) { return {item & ((1 << bits) - 1), bits}; }

/// Most columns of a spread: the threads of the smallest launch. Wider tables are spread in pieces.
constexpr int most_spread_columns = 256;

/// What a sum ends with, before its only rounding: a bf16 row times a factor, or nothing.
struct LastTerm {
  const bf16* row = nullptr;
  float factor = 1.0f;
};

// Verbs (W is a Worker, `word` and rows lie in the heap or in this rank's ordinary memory):
//   w.index(), w.count()       which of this rank's workers this is
//   w.squad_index(), w.squad_count()  which of its squad: workers that meet cheaply and share fast memory (a CTA; on
//                              the host all workers of the rank are one squad)
//   w.squad(), w.squads()      on a GPU: which squad of the rank's this is
//   w.first_squad()            is this the squad that leaves behind what later halves need?
//   w.heap()                   the HeapView
//   w.epoch()                  the tag of this call's words
//   w.live(rank)               false for a masked (dead) rank; w.all_live(): surely none is
//   w.begin()                  first verb of every half: false if the abort word stands
//   w.read(p), w.write(p, v)   one plain value of 4 or 8 bytes in the heap, ordered only by publish and acquire
//   w.copy_row(to, from, fmt)  a wire row; w.copy_bytes(to, from, n): anything else, n a multiple
//                              of 4 (a thread: any); its source is read at the call, a row's until complete()
//   w.quantise_row(to, from, fmt)  a bf16 row to its wire format
//   w.staging(fmt)             this worker's ordinary row for quantised values on their way out
//   w.complete(ticket)         the copy has been done; w.complete_all(): all of this worker's, so they may be published
//   w.clear(to, n)             n bytes of the heap, a multiple of 16, become 0
//   w.add_values(to, from, n)  to[i] = bf16(to[i] + from[i]) for i < n, an even number, in the heap of any rank, each at once:
//                              others may add to the same values meanwhile, and nobody may read or write them otherwise
//   w.add_words(to, from, n)   to += from over n bytes of 32-bit integers
//   w.publish(word, value)     every earlier write of this worker, then one release store at system scope
//   w.acquire(word, name, v)   waits until the word carries this epoch, then v = its value (acquire)
//   w.acquire_at_least(word, name, least, v)   likewise, and until the value is at least `least`
//   w.peek(word, v)            as acquire without waiting: false if the word is not of this epoch
//   w.start_count(word)        the counter becomes this call's, at 0; ordered by publish. By one lane, inside of spread
//   w.add(word, n)             adds to a counter of this call in this rank's own part; returns what it was. Orders every earlier
//                              write of this worker before, and what earlier adders wrote, after
//   w.acquire_own(word, name, least)   as acquire_at_least, of a word that fellow workers of this rank write: waits twice as long,
//                              anew whenever something in this rank's part changes, so that who waits for another rank names it
//                              first
//   w.fail(name, expected, seen)   gives up for all, over a value that cannot be; returns false
//   w.send_tagged(n, to, from, words, part)  a row to the words to(i) for i < n (null: left out): four bytes and this call's tag in
//                              each, in no order; an even number of words, at places where nothing else is ever written
//   w.send_tagged_values(n, to, count, value)  likewise value(i), four bytes, for i < count
//   w.take_tagged(to, row, words, part)  waits until such a row's words carry this call's tag, then puts it to `to`; orders
//                              nothing else. Taken::none where the row's count says that it does not come
//   w.take_tagged_values(row, first, count, f)  likewise f(i, value) for the words from `first` on, each by one lane
//   w.reduce_tagged(out, n, rows, format, last, part)  as reduce_rows, over bf16 rows that come as words; false on abort
//   w.look()                   a wait made of peeks begins: call before the first peek of a round
//   w.rest(patience, name, expected, seen)   between rounds that found nothing: sleeps until some word of this
//                              rank's part changes; false when the deadline since look() has passed.
//                              expected, seen: words as they are, epoch included, for the error
//   w.team_barrier()           all workers of this rank; orders their writes
//   w.note_progress()          rows move: fellow workers that wait at the team barrier begin their wait anew
//   w.note_rests()             what this worker has waited in rest(), for who counts it after the next team barrier
//   w.squad_barrier()          all workers of this squad; orders their writes
//   w.last_of_team()           host: true for the last worker of the rank that comes here; it has seen what all did before
//   w.enumerate_sets, w.enumerate_kinds  exact numbers of one worker's items, see numbering.hpp
//   w.add_kinds(n, class_of, counts)  on a GPU, by all of a squad: counts[class_of(i)] grows by 1 for every i < n; below 0: none
//   w.lanes(n, f)              f(i) for i < n, each by one lane; w.once(f): f() by one lane; both seen by all lanes after
//   w.deal(regions, group, bits, count_of, visit)  rows [0, count_of(region)) of all regions, each in 2^bits parts, dealt
//                              evenly over the workers: visit(region, slot, before, part), before: rows of earlier regions
//                              of the same group of regions; returns the rows of the last group
//   w.chunk(preferred, n)      how many of n items one worker numbers: all on the host, `preferred` on a GPU
//   w.prefix_sums(n, values, stride)  values[i * stride] becomes the sum of the earlier ones; returns the sum of all
//   w.sum_values(n, values)    their sum
//   w.part_bits(rows, hidden)  rows are divided into 2^bits parts, so that all workers have some
//   w.spread(rows, columns, f) f(row, column), dealt over all lanes of the rank, at most most_spread_columns; w.load(p): a value
//                              of 4 or 8 bytes in the heap, by one lane, inside of it
//   w.reduce_rows(out, n, terms, format, last, part)  out = bf16(sum over i < n of terms(i), then last.factor * last.row)
// What a thread does one by one and a warp side by side is in bulk.hpp.
template <class W>
concept Worker = requires(W& w, Word* word, const Word* seen, std::uint32_t& value, std::byte* row, const std::byte* source,
                          const RowFormat& format, const WordName& name, std::int32_t* number, const bf16* values) {
  { w.index() } -> std::convertible_to<int>;
  { w.count() } -> std::convertible_to<int>;
  { w.heap() } -> std::convertible_to<const HeapView&>;
  { w.epoch() } -> std::convertible_to<std::uint32_t>;
  { w.live(0) } -> std::convertible_to<bool>;
  { w.begin() } -> std::convertible_to<bool>;
  { w.read(number) } -> std::convertible_to<std::int32_t>;
  w.write(number, 1);
  { w.copy_row(row, source, format) } -> std::convertible_to<Ticket>;
  { w.copy_bytes(row, source, 16) } -> std::convertible_to<Ticket>;
  { w.quantise_row(row, values, format) } -> std::convertible_to<Ticket>;
  w.complete(Ticket{});
  w.complete_all();
  w.add_words(row, source, 16);
  w.publish(word, 1u);
  { w.acquire(seen, name, value) } -> std::convertible_to<bool>;
  { w.peek(seen, value) } -> std::convertible_to<bool>;
  w.note_progress();
  w.note_rests();
  { w.team_barrier() } -> std::convertible_to<bool>;
};

/// One whose rank's workers count together: what the fused layer needs beside.
template <class W>
concept CountingWorker = Worker<W> &&
    requires(W& w, Word* word, const WordName& name, std::byte* row, bf16* values, const bf16* addends) {
  w.start_count(word);
  w.clear(row, std::size_t{16});
  w.add_values(values, addends, 2);
  { w.add(word, 1u) } -> std::convertible_to<std::uint32_t>;
  { w.acquire_own(word, name, 1u) } -> std::convertible_to<bool>;
  { w.fail(name, 0u, 0u) } -> std::convertible_to<bool>;
};

}  // namespace heddle
