// What protocols do with many rows or words at once: a thread one by one, with the verbs of worker.hpp; a warp
// side by side, with verbs of its own.
#pragma once

#include <cstdint>

#include "signal/worker.hpp"

namespace heddle {

/// A bf16 row in wire format to to(i) for i < n; null places are left out.
template <Worker W, class To>
HEDDLE_PROTOCOL void send_row(W& w, int n, To to, const bf16* row, const RowFormat& format, const RowPart& part = {}) {
  if constexpr (W::is_warp) {
    w.send_row(n, to, row, format, part);
  } else {
    const std::byte* bytes = nullptr;
    for (int i = 0; i < n; ++i) {
      std::byte* place = to(i);
      if (place == nullptr) continue;
      if (bytes == nullptr && format.wire == Wire::bf16) bytes = reinterpret_cast<const std::byte*>(row);
      if (bytes == nullptr) {
        std::byte* staged = w.staging(format);
        w.complete(w.quantise_row(staged, row, format));
        bytes = staged;
      }
      w.copy_row(place, bytes, format);
    }
  }
}

/// A row that is in wire format already.
template <Worker W, class To>
HEDDLE_PROTOCOL void copy_row(W& w, int n, To to, const std::byte* row, const RowFormat& format, const RowPart& part = {}) {
  if constexpr (W::is_warp) {
    w.copy_row_to(n, to, row, format, part);
  } else {
    for (int i = 0; i < n; ++i) {
      std::byte* place = to(i);
      if (place != nullptr) w.copy_row(place, row, format);
    }
  }
}

/// `count` 4-byte values to to(i) for i < n; null places are left out.
template <Worker W, class To, class T>
HEDDLE_PROTOCOL void send_values(W& w, int n, To to, const T* values, int count) {
  static_assert(sizeof(T) == 4);
  if constexpr (W::is_warp) {
    w.send_values(n, to, values, count);
  } else {
    for (int i = 0; i < n; ++i) {
      T* place = to(i);
      if (place != nullptr) w.copy_bytes(place, values, static_cast<std::size_t>(count) * sizeof(T));
    }
  }
}

/// value(i) to to(i) for i < n, 4 or 8 bytes each; null places are left out.
template <Worker W, class To, class Value>
HEDDLE_PROTOCOL void write_each(W& w, int n, To to, Value value) {
  if constexpr (W::is_warp) {
    w.write_each(n, to, value);
  } else {
    for (int i = 0; i < n; ++i) {
      auto* place = to(i);
      if (place != nullptr) w.write(place, value(i));
    }
  }
}

/// convert(*from(row, column)) for all rows and columns of the heap, in memory of this worker's squad; null where that does
/// not suffice, and on the host, where all workers read ordinary memory alike.
template <Worker W, class From, class Convert>
HEDDLE_PROTOCOL const std::int32_t* squad_copy(W& w, int rows, int columns, From from, Convert convert) {
  if constexpr (W::is_warp) {
    return w.squad_copy(rows, columns, from, convert);
  } else {
    return nullptr;
  }
}

/// *from(i) for i < n (null: 0), which are in the heap, for all workers of the squad; the first squad leaves them in `values`
/// [n]. Null on abort.
template <Worker W, class From>
HEDDLE_PROTOCOL const std::int32_t* take_values(W& w, int n, From from, std::int32_t* values) {
  if constexpr (W::is_warp) {
    return w.take_values(n, from, values);
  } else {
    for (int i = w.index(); i < n; i += w.count()) {
      const std::int32_t* place = from(i);
      values[i] = place == nullptr ? 0 : w.read(place);
    }
    return w.team_barrier() ? values : nullptr;
  }
}

/// What f(i) is for i < n, asked for as values(i): by a thread when it is asked, by a warp a lane each and all at once, so
/// that chains of reads run side by side. All lanes ask alike. 4 or 8 bytes.
template <Worker W, class F>
HEDDLE_PROTOCOL auto side_by_side(W& w, int n, F f) {
  if constexpr (W::is_warp) {
    return w.side_by_side(n, f);
  } else {
    return f;
  }
}

/// The same where only values with .counts() matter: n becomes how many do, in order, and values(i) is the i-th of those. A
/// thread skips the others itself: n stays, and they are asked for as well.
template <Worker W, class F>
HEDDLE_PROTOCOL auto those_that_count(W& w, int& n, F f) {
  if constexpr (W::is_warp) {
    return w.those_that_count(n, f);
  } else {
    return f;
  }
}

/// The end of a sending half. When all workers of the rank have done their part, word(i) for i < n (null: left out) says so,
/// with value(i) < 2^24. On a GPU every squad speaks for itself, in a word of its own behind word(i).
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void announce(W& w, int n, WordOf word, Value value) {
  w.complete_all();
  if constexpr (W::is_warp) {
    w.announce(n, word, value);
  } else {
    if (!w.last_of_team()) return;
    for (int i = 0; i < n; ++i) {
      Word* place = word(i);
      if (place != nullptr) w.publish(place, static_cast<std::uint32_t>(value(i)));
    }
  }
}

/// The same, but on a GPU, too, the last one to come speaks for all: every word is one.
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void announce_together(W& w, int n, WordOf word, Value value) {
  if constexpr (W::is_warp) {
    w.complete_all();
    w.announce_together(n, word, value);
  } else {
    announce(w, n, word, value);
  }
}

/// The same by one worker for the whole rank, when the others have nothing to say.
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void announce_alone(W& w, int n, WordOf word, Value value) {
  if constexpr (W::is_warp) {
    w.announce_alone(n, word, value);
  } else {
    for (int i = 0; i < n; ++i) {
      Word* place = word(i);
      if (place != nullptr) w.publish(place, static_cast<std::uint32_t>(value(i)));
    }
  }
}

/// Waits for the words word(i), i < n (null: not waited for), by one worker for itself.
template <Worker W, class WordOf, class NameOf>
HEDDLE_PROTOCOL bool acquire_each(W& w, int n, WordOf word, NameOf name) {
  if constexpr (W::is_warp) {
    return w.acquire_each(n, word, name);
  } else {
    for (int i = 0; i < n; ++i) {
      const Word* place = word(i);
      std::uint32_t value = 0;
      if (place != nullptr && !w.acquire(place, name(i), value)) return false;
    }
    return true;
  }
}

/// As publish, of a word that fellow workers of this rank alone read.
template <CountingWorker W>
HEDDLE_PROTOCOL void publish_own(W& w, Word* word, std::uint32_t value) {
  if constexpr (W::is_warp) {
    w.publish_own(word, value);
  } else {
    w.publish(word, value);
  }
}

/// Adds number(i) to the counter word(i) for begin <= i < end <= 32, as w.add does, where nobody wants to know what it was. A warp
/// asks lane i for them.
template <CountingWorker W, class WordOf, class Number>
HEDDLE_PROTOCOL void add_each(W& w, int begin, int end, WordOf word, Number number) {
  if constexpr (W::is_warp) {
    w.add_each(begin, end, word, number);
  } else {
    for (int i = begin; i < end; ++i) w.add(word(i), number(i));
  }
}

/// As acquire_own of word_of(0); how many of the words word_of(i), i < n, are ready then, in a row from the first; 0: gave up. A
/// warp looks at up to 32 at once.
template <CountingWorker W, class WordOf>
HEDDLE_PROTOCOL int acquire_own_run(W& w, int n, WordOf word_of, const WordName& name, std::uint32_t least) {
  if constexpr (W::is_warp) {
    return w.acquire_own_run(n, word_of, name, least);
  } else {
    return w.acquire_own(word_of(0), name, least) ? 1 : 0;
  }
}

/// All workers of the rank wait for what was announced in word(i) for i < n (null: not waited for, its value is 0); false on
/// abort. Where the values are wanted, the first squad leaves them in `values` [n], and *seen is where this worker's
/// squad may read them.
template <Worker W, class WordOf, class NameOf>
HEDDLE_PROTOCOL bool hear_each(W& w, int n, WordOf word, NameOf name, std::int32_t* values, const std::int32_t** seen) {
  if constexpr (W::is_warp) {
    return w.hear_each(n, word, name, values, seen);
  } else {
    for (int i = w.index(); i < n; i += w.count()) {
      const Word* place = word(i);
      std::uint32_t value = 0;
      if (place != nullptr && !w.acquire(place, name(i), value)) return false;
      if (values != nullptr) values[i] = static_cast<std::int32_t>(value);
    }
    if (seen != nullptr) *seen = values;
    return w.team_barrier();
  }
}

}  // namespace heddle
