// The Worker of the host engine: a thread. Copies are done when the verb returns; words are atomics
// in shared memory; waits sleep on the doorbell of this rank's part.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "formats/rows.hpp"
#include "signal/doorbell.hpp"
#include "signal/fault.hpp"
#include "signal/one_lane.hpp"
#include "signal/worker.hpp"

namespace heddle {

/// What all workers of one rank share during a call.
struct HostTeam {
  HeapView heap;
  int count = 1;
  std::chrono::nanoseconds deadline{};
  const std::vector<bool>* live = nullptr;             ///< null: all
  int spins = 0;                                       ///< looks at a word before sleeping
  const std::function<void()>* before_verb = nullptr;  ///< tests inject delays here
  mutable std::uint64_t progress = 0;                  ///< counts what note_progress() told
  NodeLink* link = nullptr;                            ///< the first worker's, which has it make progress while it waits
};

/// Before the workers of a rank start a half: none of them is inside a barrier, and their number may
/// differ from that of the last half.
void start_team(const HeapView& heap);

class HostWorker : public OneLane<HostWorker> {
 public:
  using Clock = std::chrono::steady_clock;
  /// One wait made of many peeks: when it began, and the doorbell as last read.
  struct Patience {
    Clock::time_point since;
    std::uint32_t rung = 0;
  };
  /// Of no call until start(): one may be made while another exchange of the workspace is in the middle of its own.
  HostWorker(const HostTeam& team, int index);

  int index() const { return index_; }
  int count() const { return team_.count; }
  const HeapView& heap() const { return team_.heap; }
  std::uint32_t epoch() const { return epoch_; }
  bool all_live() const { return team_.live == nullptr; }
  bool live(int rank) const { return team_.live == nullptr || (*team_.live)[static_cast<std::size_t>(rank)]; }
  /// Begins a part of a call: takes its epoch.
  void start(CallPart part);

  bool begin();
  template <class T>
  T read(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    verb();
    return *address;
  }
  template <class T>
  T load(const T* address) {
    return read(address);
  }
  template <class T>
  void write(T* address, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    verb();
    *address = value;
  }
  Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format);
  Ticket copy_bytes(void* to, const void* from, std::size_t bytes);
  Ticket quantise_row(std::byte* to, const bf16* from, const RowFormat& format);
  /// This worker's row for quantised values on their way out; earlier copies from it are done.
  std::byte* staging(const RowFormat& format);
  void complete(Ticket) {}
  void complete_all() {}
  void clear(std::byte* to, std::size_t bytes);
  void add_values(bf16* to, const bf16* from, int n);
  /// to[i] += from[i] over 32-bit integers: the all-reduce of rows of which at most one is not zero.
  void add_words(std::byte* to, const std::byte* from, std::size_t bytes);
  void publish(Word* word, std::uint32_t value);
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) { return acquire_at_least(word, name, 0, value); }
  bool acquire_at_least(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value);
  bool peek(const Word* word, std::uint32_t& value);
  void start_count(Word* word);
  std::uint32_t add(Word* word, std::uint32_t n);
  bool acquire_own(const Word* word, const WordName& name, std::uint32_t least);
  bool fail(const WordName& name, std::uint64_t expected, std::uint64_t seen);
  template <class To>
  void send_tagged(int n, To to, const std::byte* from, int words, const RowPart&) {
    send_tagged_values(n, to, words, [from](int i) {
      std::uint32_t value = 0;
      std::memcpy(&value, from + tagged_bytes_a_word * static_cast<std::size_t>(i), sizeof value);
      return value;
    });
  }
  template <class To, class Value>
  void send_tagged_values(int n, To to, int count, Value value) {
    verb();
    for (int d = 0; d < n; ++d) {
      Word* place = to(d);
      if (place == nullptr) continue;
      for (int i = 0; i < count; ++i) std::atomic_ref<Word>(place[i]).store(pack_word(epoch_, value(i)), std::memory_order_relaxed);
      ring(*team_.heap.at<HeapHeader>(team_.heap.owner(place), 0));
    }
  }
  Taken take_tagged(std::byte* to, const TaggedRow& row, int words, const RowPart& = {}) {
    return take_tagged_values(row, 0, words, [to](int i, std::uint32_t value) {
      std::memcpy(to + tagged_bytes_a_word * static_cast<std::size_t>(i), &value, sizeof value);
    });
  }
  template <class F>
  Taken take_tagged_values(const TaggedRow& row, int first, int count, F f) {
    verb();
    std::uint32_t value = 0;
    if (row.count != nullptr) {
      if (!take_word(row.count, row.name, value)) return Taken::gave_up;
      if (announced_value(value) <= row.number) return Taken::none;
    }
    for (int i = 0; i < count; ++i) {
      if (!take_word(row.words + first + i, row.name, value)) return Taken::gave_up;
      f(i, value);
    }
    return Taken::here;
  }
  template <class Rows>
  bool reduce_tagged(bf16* out, int n, Rows rows, const SumFormat& format, const LastTerm& last, const RowPart& = {}) {
    start_sum(format.row.hidden);
    std::byte* taken = staging(format.row);
    for (int i = 0; i < n; ++i) {
      const TaggedRow row = rows(i);
      if (row.words == nullptr) continue;
      if (take_tagged(taken, row, static_cast<int>(format.row.row_bytes() / tagged_bytes_a_word)) != Taken::here) return false;
      add_to_sum({taken}, format);
    }
    finish_sum(out, format.row.hidden, last);
    return true;
  }
  Patience look();
  bool rest(Patience& patience, const WordName& name, Word expected, Word seen);
  void note_progress();
  bool team_barrier();
  template <class Terms>
  void reduce_rows(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, const RowPart& = {}) {
    verb();
    start_sum(format.row.hidden);
    for (int i = 0; i < n; ++i) {
      const SumTerm term = terms(i);
      if (term.row != nullptr) add_to_sum(term, format);
    }
    finish_sum(out, format.row.hidden, last);
  }
  bool squad_barrier() { return team_barrier(); }
  bool last_of_team();

 private:
  void verb() const {
    if (team_.before_verb != nullptr) (*team_.before_verb)();
  }
  bool aborted() const;
  /// Waits until a word carries this call's tag; orders nothing.
  bool take_word(const Word* word, const WordName& name, std::uint32_t& value);
  /// Looks again and again, asleep in between, until `arrived` holds; false on abort or deadline. The clock starts anew
  /// whenever moved(doorbell as read) gives another number: fellow workers get on.
  template <class Arrived, class Moved>
  bool wait(const Word* word, const WordName& name, std::uint64_t expected, std::chrono::nanoseconds longest, Arrived arrived,
            Moved moved);
  template <class Arrived>
  bool wait(const Word* word, const WordName& name, std::uint64_t expected, std::chrono::nanoseconds longest, Arrived arrived) {
    return wait(word, name, expected, longest, arrived, [](std::uint32_t) { return 0; });
  }
  Doorbell doorbell() const { return Doorbell(*team_.heap.mine<HeapHeader>(0), index_ == 0 ? team_.link : nullptr); }
  std::uint64_t progress() const { return std::atomic_ref<std::uint64_t>(team_.progress).load(std::memory_order_relaxed); }
  void start_sum(int hidden);
  void add_to_sum(const SumTerm& term, const SumFormat& format);
  void finish_sum(bf16* out, int hidden, const LastTerm& last);

  const HostTeam& team_;
  int index_;
  std::uint32_t epoch_ = 0;
  std::vector<float> sum_;
  std::vector<float> widened_;
  std::vector<std::byte> staging_;
};

}  // namespace heddle
