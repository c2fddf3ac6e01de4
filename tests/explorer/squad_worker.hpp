// The Worker of the schedule explorer as GPUs have it: a rank is several squads, each of one warp here. Squads speak and hear for
// themselves, number what is few by themselves, and share rows in parts: the paths of protocols that a worker of one lane does
// not take. What lanes do side by side is done in turn.
#pragma once

#include <memory>
#include <vector>

#include "explorer/worker.hpp"

namespace heddle::explorer {

/// With room squads have memory of their own; without, everything goes through the rank's ordinary memory and its meetings.
template <bool roomy>
class SquadWorker : public ExplorerWorker {
 public:
  static constexpr bool is_warp = true;
  using ExplorerWorker::ExplorerWorker;
  virtual ~SquadWorker() = default;

  int squad_index() const { return 0; }
  int squad_count() const { return 1; }
  bool first_squad() const { return index() == 0; }
  bool squad_barrier() { return true; }
  /// Chunks so small that few items fill several.
  int chunk(int, int) const { return 2; }
  void prefix_columns(int worker, int workers, int rows, int columns, std::int32_t* values, std::int32_t* totals) {
    for (int c = worker; c < columns; c += workers) totals[c] = prefix_sums(rows, values + c, columns);
  }
  std::int32_t* squad_array(int n) {
    if (!roomy) return nullptr;
    arrays_.push_back(std::make_unique<std::int32_t[]>(static_cast<std::size_t>(n)));
    return arrays_.back().get();
  }

  // --- Rows, halved where there are fewer than squads ---

  int part_bits(int rows, int) const { return rows < count() ? 1 : 0; }
  template <class To>
  void send_row(int n, To to, const bf16* row, const RowFormat& format, const RowPart& part) {
    if (format.wire == Wire::bf16) return copy_row_to(n, to, reinterpret_cast<const std::byte*>(row), format, part);
    if (!part.last()) return;  // groups of scales are not cut
    for (int i = 0; i < n; ++i) {
      std::byte* place = to(i);
      if (place != nullptr) quantise_row(place, row, format);
    }
  }
  template <class To>
  void copy_row_to(int n, To to, const std::byte* row, const RowFormat& format, const RowPart& part) {
    const int cells = static_cast<int>(format.row_bytes() / 4);
    const auto begin = static_cast<std::size_t>(4 * part.begin(cells));
    const auto end = static_cast<std::size_t>(4 * part.end(cells));
    for (int i = 0; i < n; ++i) {
      std::byte* place = to(i);
      if (place != nullptr) copy_bytes(place + begin, row + begin, end - begin);
    }
  }
  template <class Terms>
  void reduce_rows(bf16* out, int n, Terms terms, const SumFormat& format, const LastTerm& last, const RowPart& part = {}) {
    if (format.row.wire != Wire::bf16) {
      if (part.last()) ExplorerWorker::reduce_rows(out, n, terms, format, last);
      return;
    }
    const int begin = part.begin(format.row.hidden);
    SumFormat piece = format;
    piece.row.hidden = part.end(format.row.hidden) - begin;
    const auto shifted = [&](int i) {
      SumTerm term = terms(i);
      if (term.row != nullptr) term.row += static_cast<std::size_t>(begin) * sizeof(bf16);
      return term;
    };
    const LastTerm rest{last.row == nullptr ? nullptr : last.row + begin, last.factor};
    ExplorerWorker::reduce_rows(out + begin, n, shifted, piece, rest);
  }
  template <class CountOf, class Visit>
  int deal(int regions, int group, int bits, CountOf count_of, Visit visit) {
    int item = 0;
    int next = index();
    int before = 0;
    for (int region = 0; region < regions; ++region) {
      if (region % group == 0) before = 0;
      const int rows = count_of(region);
      for (; next < item + (rows << bits); next += count())
        visit(region, row_of(next - item, bits), before, part_of(next - item, bits));
      item += rows << bits;
      before += rows;
    }
    return before;
  }
  template <class To, class T>
  void send_values(int n, To to, const T* values, int count) {
    for (int i = 0; i < n; ++i) {
      T* place = to(i);
      if (place != nullptr) copy_bytes(place, values, static_cast<std::size_t>(count) * sizeof(T));
    }
  }
  template <class To, class Value>
  void write_each(int n, To to, Value value) {
    for (int i = 0; i < n; ++i) {
      auto* place = to(i);
      if (place != nullptr) write(place, value(i));
    }
  }

  // --- Values ---

  template <class F>
  F side_by_side(int, F f) {
    return f;
  }
  /// Those that count, in order: looked up at once, as by lanes.
  template <class F>
  auto those_that_count(int& n, F f) {
    std::vector<decltype(f(0))> kept;
    for (int i = 0; i < n; ++i) {
      const auto value = f(i);
      if (value.counts()) kept.push_back(value);
    }
    n = static_cast<int>(kept.size());
    return [kept](int i) { return kept[static_cast<std::size_t>(i)]; };
  }
  template <class From, class Convert>
  const std::int32_t* squad_copy(int rows, int columns, From from, Convert convert) {
    std::int32_t* copy = squad_array(rows * columns);
    for (int i = 0; copy != nullptr && i < rows * columns; ++i) copy[i] = convert(read(from(i / columns, i % columns)));
    return copy;
  }
  template <class From>
  const std::int32_t* take_values(int n, From from, std::int32_t* values) {
    std::int32_t* mine = squad_array(n);
    if (mine == nullptr) mine = values;
    for (int i = 0; i < n; ++i) {
      const std::int32_t* place = from(i);
      mine[i] = place == nullptr ? 0 : read(place);
      if (first_squad()) values[i] = mine[i];
    }
    return mine;
  }

  // --- Words: one a squad, and in the first bits of their value how many squads speak ---

  template <class WordOf, class Value>
  void announce(int n, WordOf word, Value value) {
    speak(n, word, value, index(), count());
  }
  template <class WordOf, class Value>
  void announce_alone(int n, WordOf word, Value value) {
    speak(n, word, value, 0, 1);
  }
  template <class WordOf, class NameOf>
  bool hear_each(int n, WordOf word, NameOf name, std::int32_t* values, const std::int32_t** seen) {
    std::int32_t* mine = values == nullptr ? nullptr : squad_array(n);
    if (mine == nullptr) mine = values;
    for (int i = 0; i < n; ++i) {
      const Word* words = word(i);
      std::uint32_t first = 0;
      if (words != nullptr) first = hear_all_of(words, name(i));
      if (mine == nullptr) continue;
      mine[i] = announced_value(first);
      if (first_squad()) values[i] = mine[i];
    }
    if (seen != nullptr) *seen = mine;
    return true;
  }
  void end_launch() {
    ExplorerWorker::end_launch();
    arrays_.clear();
  }

 protected:
  template <class WordOf, class Value>
  void speak(int n, WordOf word, Value value, int squad, int squads) {
    const auto said = static_cast<std::uint32_t>(squads) << announced_bits;
    for (int i = 0; i < n; ++i) {
      Word* words = word(i);
      if (words != nullptr) publish(words + squad, said | static_cast<std::uint32_t>(value(i)));
    }
  }
  /// Waits for every squad that the first one's word tells of; returns that word's value.
  virtual std::uint32_t hear_all_of(const Word* words, const WordName& name) {
    std::uint32_t first = 0;
    std::uint32_t other = 0;
    acquire(words, name, first);
    for (std::uint32_t squad = 1; squad < first >> announced_bits; ++squad) acquire(words + squad, name, other);
    return first;
  }

 private:
  std::vector<std::unique_ptr<std::int32_t[]>> arrays_;  ///< of this launch
};

}  // namespace heddle::explorer
