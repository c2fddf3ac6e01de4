// The Worker of the schedule explorer: the verbs of a protocol as steps of a Machine.
//
// Copies that give a ticket are under way until they are completed: until then no other worker may
// count on them, the worker itself may not read what they write, and their source must stay as it was.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "explorer/machine.hpp"
#include "formats/row_format.hpp"
#include "signal/one_lane.hpp"
#include "signal/worker.hpp"

namespace heddle::explorer {

class ExplorerWorker : public OneLane<ExplorerWorker> {
 public:
  struct Patience {
    std::uint32_t rung = 0;
  };
  ExplorerWorker(Machine& machine, int rank, int index);

  int index() const { return index_; }
  int count() const { return count_; }
  const HeapView& heap() const { return heap_; }
  std::uint32_t epoch() const { return epoch_; }
  bool all_live() const { return false; }
  bool live(int rank) const { return machine_.live(rank); }

  bool begin();
  template <class T>
  T read(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    T value;
    load(address, &value, sizeof value);
    return value;
  }
  template <class T>
  T load(const T* address) {
    return read(address);
  }
  template <class T>
  void write(T* address, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    store(address, &value, sizeof value);
  }
  Ticket copy_row(std::byte* to, const std::byte* from, const RowFormat& format);
  Ticket copy_bytes(void* to, const void* from, std::size_t bytes);
  Ticket quantise_row(std::byte* to, const bf16* from, const RowFormat& format);
  std::byte* staging(const RowFormat& format);
  void complete(Ticket ticket);
  void complete_all();
  void clear(std::byte* to, std::size_t bytes);
  void add_values(bf16* to, const bf16* from, int n);
  void add_words(std::byte* to, const std::byte* from, std::size_t bytes);
  void publish(Word* word, std::uint32_t value) { store_word(word, pack_word(epoch_, value), true); }
  bool acquire(const Word* word, const WordName& name, std::uint32_t& value) { return acquire_at_least(word, name, 0, value); }
  bool acquire_at_least(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value) {
    wait_for(word, name, least, value, {});
    return true;
  }
  void start_count(Word* word) { store_word(word, pack_word(epoch_, 0), false); }
  std::uint32_t add(Word* word, std::uint32_t n);
  bool acquire_own(const Word* word, const WordName& name, std::uint32_t least) {
    std::uint32_t value = 0;
    wait_for(word, name, least, value, {});
    return true;
  }
  bool fail(const WordName& name, std::uint64_t expected, std::uint64_t seen);
  bool peek(const Word* word, std::uint32_t& value);
  template <class To>
  void send_tagged(int n, To to, const std::byte* from, int words, const RowPart& part) {
    const auto* values = reinterpret_cast<const std::uint32_t*>(from);
    const auto shifted = [&](int i) { return shift(to(i), part.begin(words)); };
    send_tagged_values(n, shifted, part.end(words) - part.begin(words),
                       [&](int i) { return read(values + part.begin(words) + i); });
  }
  template <class To, class Value>
  void send_tagged_values(int n, To to, int count, Value value) {
    for (int d = 0; d < n; ++d) {
      Word* place = to(d);
      for (int i = 0; place != nullptr && i < count; ++i) store_word(place + i, pack_word(epoch_, value(i)), false);
    }
  }
  Taken take_tagged(std::byte* to, const TaggedRow& row, int words, const RowPart& part) {
    const int first = part.begin(words);
    return take_tagged_values(row, first, part.end(words) - first,
                              [&](int i, std::uint32_t value) { write(reinterpret_cast<std::uint32_t*>(to) + first + i, value); });
  }
  template <class F>
  Taken take_tagged_values(const TaggedRow& row, int first, int count, F f) {
    if (!comes(row)) return Taken::none;
    for (int i = 0; i < count; ++i) {
      std::uint32_t value = 0;
      wait_for(row.words + first + i, row.name, 0, value, tagged_wait_);
      f(i, value);
    }
    return Taken::here;
  }
  template <class Rows>
  bool reduce_tagged(bf16* out, int n, Rows rows, const SumFormat& format, const LastTerm& last, const RowPart& part) {
    const int begin = part.begin(format.row.hidden) & ~1;  // a word has two values
    const int end = part.last() ? format.row.hidden : part.end(format.row.hidden) & ~1;
    std::vector<std::vector<std::uint32_t>> taken(static_cast<std::size_t>(n));
    terms_.clear();
    for (int i = 0; i < n; ++i) {
      const TaggedRow row = rows(i);
      if (row.words == nullptr) continue;
      std::vector<std::uint32_t>& values = taken[static_cast<std::size_t>(i)];
      values.resize(static_cast<std::size_t>(end - begin) / 2);
      take_tagged_values(row, begin / 2, (end - begin) / 2,
                         [&](int at, std::uint32_t value) { values[static_cast<std::size_t>(at)] = value; });
      terms_.push_back({reinterpret_cast<const std::byte*>(values.data())});
    }
    SumFormat piece = format;
    piece.row.hidden = end - begin;
    sum_terms(out + begin, piece, {last.row == nullptr ? nullptr : last.row + begin, last.factor});
    return true;
  }
  Patience look();
  bool rest(Patience& patience, const WordName& name, Word expected, Word seen);
  bool team_barrier() { return count() == 1 || meet(Machine::Meeting::team); }
  bool squad_barrier() { return team_barrier(); }
  bool last_of_team();
  template <class Terms>
  void reduce_rows(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, const RowPart& = {}) {
    terms_.clear();
    for (int i = 0; i < n; ++i) terms_.push_back(terms(i));
    sum_terms(out, format, last);
  }
  // Not verbs of a protocol: what scenarios need around it.
  /// A new call begins.
  void start() { ++epoch_; }
  /// The end of a call.
  void end_call() {}
  /// The end of a launch: all copies are done and the rank's workers meet.
  void end_launch();
  Machine& machine() { return machine_; }

 protected:
  /// How a wait may be wrong on purpose.
  struct Wait {
    bool acquires = true;
    bool any_tag = false;
    std::uint32_t epoch = 0;  ///< 0: this call's
  };
  void wait_for(const Word* word, const WordName& name, std::uint32_t least, std::uint32_t& value, const Wait& how);
  static constexpr Wait orders_nothing{.acquires = false, .any_tag = false, .epoch = 0};
  Wait tagged_wait_ = orders_nothing;  ///< for the words of rows
  void store_word(Word* word, Word value, bool release);

 private:
  static Word* shift(Word* words, int by) { return words == nullptr ? nullptr : words + by; }
  /// A warp looks at a row's words and at their count together. Here the count is waited for first, which orders nothing either:
  /// what the worker does then stays on its rank until the launch ends, so nothing is lost, and there are far fewer schedules.
  bool comes(const TaggedRow& row) {
    std::uint32_t value = 0;
    if (row.count == nullptr) return true;
    wait_for(row.count, row.name, 0, value, orders_nothing);
    return announced_value(value) > row.number;
  }

  struct Copy {
    std::uint32_t ticket = 0;
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t source_bytes = 0;  ///< of an ordinary source that must not change, else 0
    std::vector<std::byte> source;
    std::vector<std::byte> result;
    bool reads_heap = false;
    bool writes_heap = false;
    std::size_t heap_source_bytes = 0;
  };
  bool in_heap(const void* address) const;
  void local_verb();
  void add_access(Verb& verb, const void* address, std::size_t bytes, bool writes) const;
  /// Stops before a verb with accesses to the heap; true if it did.
  bool stop(const Verb& verb);
  void load(const void* address, void* value, std::size_t bytes);
  void store(void* address, const void* value, std::size_t bytes);
  /// What the verb that happens now sees of the plain memory it reads; a race if it must not choose.
  See decide_what_to_see();
  void read_plain(const void* from, std::byte* to, std::size_t bytes, See see, std::uint32_t ticket = 0);
  void write_plain(void* to, const std::byte* from, std::size_t bytes, std::uint32_t ticket = 0);
  Ticket start_copy(void* to, const void* from, std::size_t from_bytes, const RowFormat* convert, bool source_stays);
  void settle(const Copy& copy);
  std::size_t choose_version(std::size_t oldest, std::size_t newest);
  void sum_terms(bf16* out, const SumFormat& format, const LastTerm& last);
  bool meet(Machine::Meeting meeting);
  [[noreturn]] void violate_race(const char* now, const Race& race);

  Machine& machine_;
  HeapView heap_;
  int index_;  ///< in its team, of count_
  int count_;
  int id_;
  std::uint32_t epoch_ = 0;
  std::uint32_t tickets_ = 0;
  std::vector<Copy> under_way_;
  std::vector<std::byte> staging_;
  std::vector<SumTerm> terms_;
};

}  // namespace heddle::explorer
