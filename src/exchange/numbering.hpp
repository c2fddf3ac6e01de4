// Exact placement: a row's number is how many of its sender's earlier rows go the same way, from prefix sums and
// never from a race, so every run gives the same order.
//
// Items are cut into chunks, each numbered by one worker; a prefix sum over the chunks' counts does the rest.
// Where there are few, every squad numbers all of them for itself rather than wait for the others.
#pragma once

#include <cstdint>

#include "exchange/areas.hpp"
#include "signal/worker.hpp"

namespace heddle {

/// Items of a chunk where an item may be of many classes (a token that goes to ranks), and where it is of one (a pair
/// that goes to an expert).
constexpr int set_chunk = 32;
constexpr int kind_chunk = 256;
/// Up to so many items are few (docs/performance.md).
constexpr int few_sets = 1024;
constexpr int few_kinds = 8192;

/// Who shares a piece of work: all workers of the rank, or each squad for itself.
enum class Crew : bool { team, squad };

template <Worker W>
HEDDLE_PROTOCOL int crew_index(const W& w, Crew crew) {
  return crew == Crew::squad ? w.squad_index() : w.index();
}
template <Worker W>
HEDDLE_PROTOCOL int crew_count(const W& w, Crew crew) {
  return crew == Crew::squad ? w.squad_count() : w.count();
}
template <Worker W>
HEDDLE_PROTOCOL bool crew_barrier(W& w, Crew crew) {
  return crew == Crew::squad ? w.squad_barrier() : w.team_barrier();
}

/// The memory of a numbering.
struct Numbering {
  std::int32_t* numbers = nullptr;  ///< [items, classes], or [items] where an item has one class
  std::int32_t* totals = nullptr;   ///< [classes]
  std::int32_t* before = nullptr;   ///< [chunks, classes]
};

/// The crew that numbers some items, and its memory: each squad for itself where its memory suffices and the items are
/// `few`, so that going through them again and again costs less than meetings of all; else `memory` as it is.
template <Worker W>
HEDDLE_PROTOCOL Crew crew_for(W& w, bool few, int numbers, int classes, int chunks, Numbering& memory) {
  if constexpr (W::is_warp) {
    std::int32_t* mine = few ? w.squad_array(numbers + classes + chunks * classes) : nullptr;
    if (mine != nullptr) {
      memory = {mine, mine + numbers, mine + numbers + classes};
      return Crew::squad;
    }
  }
  return Crew::team;
}

/// before[chunk, class] becomes the sum of earlier chunks, totals[class] that of all. Begins and ends with a barrier.
template <Worker W>
HEDDLE_PROTOCOL bool sum_chunks(W& w, Crew crew, int chunks, int classes, const Numbering& to) {
  if (!crew_barrier(w, crew)) return false;
  if constexpr (W::is_warp) {
    w.prefix_columns(crew_index(w, crew), crew_count(w, crew), chunks, classes, to.before, to.totals);
  } else {
    for (int c = crew_index(w, crew); c < classes; c += crew_count(w, crew))
      to.totals[c] = w.prefix_sums(chunks, to.before + c, classes);
  }
  return crew_barrier(w, crew);
}

/// numbers[i, class] = how many earlier items are of the class, or -1 where item i is not; totals[class] = how many are.
/// bits(i, j): the classes [32 j, 32 j + 32) of item i. Ends with a barrier.
template <Worker W, class Bits>
HEDDLE_PROTOCOL bool number_sets(W& w, Crew crew, int n, int classes, Bits bits, const Numbering& to) {
  const int chunk = w.chunk(set_chunk, n);
  const int chunks = (n + chunk - 1) / chunk;
  if (chunks <= 1) {
    if (crew_index(w, crew) == 0) w.enumerate_sets(n, classes, bits, to.numbers, to.totals);
    return crew_barrier(w, crew);
  }
  for (int part = crew_index(w, crew); part < chunks; part += crew_count(w, crew)) {
    const int first = part * chunk;
    const int items = n - first < chunk ? n - first : chunk;
    w.enumerate_sets(
        items, classes, [&](int i, int j) { return bits(first + i, j); }, to.numbers + first * classes, to.before + part * classes);
  }
  if (!sum_chunks(w, crew, chunks, classes, to)) return false;
  for (int part = crew_index(w, crew); part < chunks; part += crew_count(w, crew)) {
    const int first = part * chunk;
    const int items = n - first < chunk ? n - first : chunk;
    w.lanes(items * classes, [&](int i) {
      std::int32_t& number = to.numbers[first * classes + i];
      if (number >= 0) number += to.before[part * classes + i % classes];
    });
  }
  return crew_barrier(w, crew);
}

/// Items that one worker numbers by class.
template <Worker W>
HEDDLE_PROTOCOL int kinds_chunk(const W& w, Crew crew, int n) {
  if constexpr (W::is_warp) {
    if (crew == Crew::squad)
      return set_chunk * ((n + set_chunk * w.squad_count() - 1) / (set_chunk * w.squad_count()) + (n == 0 ? 1 : 0));
  }
  return w.chunk(kind_chunk, n);
}

/// numbers[i] = how many earlier items are of item i's class; totals[class] = how many are. class_of(i) < 0: of none.
/// A worker numbers `chunk` items at a time. Ends with a barrier.
template <Worker W, class ClassOf>
HEDDLE_PROTOCOL bool number_kinds(W& w, Crew crew, int chunk, int n, int classes, ClassOf class_of, const Numbering& to) {
  const int chunks = (n + chunk - 1) / chunk;
  if (chunks <= 1) {
    if (crew_index(w, crew) == 0) w.enumerate_kinds(n, classes, class_of, to.numbers, to.totals);
    return crew_barrier(w, crew);
  }
  for (int part = crew_index(w, crew); part < chunks; part += crew_count(w, crew)) {
    const int first = part * chunk;
    const int items = n - first < chunk ? n - first : chunk;
    w.enumerate_kinds(
        items, classes, [&](int i) { return class_of(first + i); }, to.numbers + first, to.before + part * classes);
  }
  if (!sum_chunks(w, crew, chunks, classes, to)) return false;
  for (int part = crew_index(w, crew); part < chunks; part += crew_count(w, crew)) {
    const int first = part * chunk;
    const int items = n - first < chunk ? n - first : chunk;
    w.lanes(items, [&](int i) {
      const int c = class_of(first + i);
      if (c >= 0) to.numbers[first + i] += to.before[part * classes + c];
    });
  }
  return crew_barrier(w, crew);
}
template <Worker W, class ClassOf>
HEDDLE_PROTOCOL bool number_kinds(W& w, Crew crew, int n, int classes, ClassOf class_of, const Numbering& to) {
  return number_kinds(w, crew, kinds_chunk(w, crew, n), n, classes, class_of, to);
}

}  // namespace heddle
