// The verbs that for a worker of one lane are plain loops: shared by the host's thread and the schedule
// explorer's coroutine. A warp has its own (device_worker.cuh).
#pragma once

#include <cstdint>

#include "signal/worker.hpp"

namespace heddle {

/// W has index() and count().
template <class W>
class OneLane {
 public:
  static constexpr bool is_warp = false;
  int squad_index() const { return self().index(); }
  int squad_count() const { return self().count(); }
  bool first_squad() const { return true; }
  /// Whether it holds for what every lane has looked at in lanes().
  bool in_all_lanes(bool mine) const { return mine; }
  /// numbers[i, c] = how many earlier items are of class c, -1 where item i is not; counts[c] = how many are in all.
  template <class Bits>
  void enumerate_sets(int n, int classes, Bits bits, std::int32_t* numbers, std::int32_t* counts) {
    for (int c = 0; c < classes; ++c) counts[c] = 0;
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < classes; ++c) {
        const bool in = (bits(i, c / 32) >> (c % 32) & 1u) != 0;
        numbers[i * classes + c] = in ? counts[c]++ : -1;
      }
    }
  }
  /// numbers[i] = how many earlier items are of item i's class, nothing where that is negative; counts[c] as above.
  template <class ClassOf>
  void enumerate_kinds(int n, int classes, ClassOf class_of, std::int32_t* numbers, std::int32_t* counts) {
    for (int c = 0; c < classes; ++c) counts[c] = 0;
    for (int i = 0; i < n; ++i) {
      const int c = class_of(i);
      if (c >= 0) numbers[i] = counts[c]++;
    }
  }
  int chunk(int, int n) const { return n > 0 ? n : 1; }
  int part_bits(int, int) const { return 0; }
  void note_progress() {}
  void note_rests() {}
  int prefix_sums(int n, std::int32_t* values, int stride) {
    std::int32_t sum = 0;
    for (int i = 0; i < n; ++i) {
      const std::int32_t own = values[i * stride];
      values[i * stride] = sum;
      sum += own;
    }
    return sum;
  }
  int sum_values(int n, const std::int32_t* values) {
    std::int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += values[i];
    return sum;
  }
  template <class F>
  void lanes(int n, F f) {
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void spread(int rows, int columns, F f) {
    for (int row = self().index(); row < rows; row += self().count()) {
      for (int column = 0; column < columns; ++column) f(row, column);
    }
  }
  template <class F>
  void once(F f) {
    f();
  }
  template <class CountOf, class Visit>
  int deal(int regions, int group, int, CountOf count_of, Visit visit) {
    int item = 0;
    int next = self().index();
    int before = 0;
    for (int region = 0; region < regions; ++region) {
      if (region % group == 0) before = 0;
      const int rows = count_of(region);
      for (; next < item + rows; next += self().count()) visit(region, next - item, before, RowPart{});
      item += rows;
      before += rows;
    }
    return before;
  }

 private:
  const W& self() const { return static_cast<const W&>(*this); }
};

}  // namespace heddle
