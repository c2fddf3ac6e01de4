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

/// take(i, *from(i)) for i < n, dealt over all workers of the rank; where from(i) is null, `absent` instead.
template <Worker W, class From, class T, class Take>
HEDDLE_PROTOCOL void read_each(W& w, int n, From from, T absent, Take take) {
  if constexpr (W::is_warp) {
    w.read_each(n, from, absent, take);
  } else {
    for (int i = w.index(); i < n; i += w.count()) {
      const T* place = from(i);
      take(i, place == nullptr ? absent : w.read(place));
    }
  }
}

/// convert(*from(i)) for i < n in memory of this worker's squad; null where that does not suffice, and on the host, where
/// all workers read ordinary memory alike.
template <Worker W, class From, class Convert>
HEDDLE_PROTOCOL const std::int32_t* squad_copy(W& w, int n, From from, Convert convert) {
  if constexpr (W::is_warp) {
    return w.squad_copy(n, from, convert);
  } else {
    return nullptr;
  }
}

/// One worker publishes value(i) in word(i) for i < n; null words are left out.
template <Worker W, class WordOf, class Value>
HEDDLE_PROTOCOL void publish_each(W& w, int n, WordOf word, Value value) {
  if constexpr (W::is_warp) {
    w.publish_each(n, word, value);
  } else {
    for (int i = 0; i < n; ++i) {
      Word* place = word(i);
      if (place != nullptr) w.publish(place, value(i));
    }
  }
}

/// All workers of the rank wait for word(i) for i < n (null: not waited for, its value is 0); false on abort. Where the
/// values are wanted, the first squad leaves them in `values` [n], and *seen is where this worker's squad may read them.
template <Worker W, class WordOf, class NameOf>
HEDDLE_PROTOCOL bool acquire_each(W& w, int n, WordOf word, NameOf name, std::int32_t* values, const std::int32_t** seen) {
  if constexpr (W::is_warp) {
    return w.acquire_each(n, word, name, values, seen);
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
