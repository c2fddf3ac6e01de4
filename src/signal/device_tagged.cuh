// Rows as words in the hands of a warp: four bytes of data and the call's tag in each word. A lane stores and loads two words
// together; the memory model promises that each of them is whole, and nothing more is asked of it: no order, no fence. What was
// loaded and has the tag is the data, so nothing is read again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "signal/device_faults.cuh"
#include "signal/device_rows.cuh"
#include "signal/device_send.cuh"
#include "signal/device_team.hpp"
#include "signal/ptx.cuh"
#include "signal/worker.hpp"

namespace heddle {

/// The words of one call, as one warp sends and takes them. All verbs are called by all lanes alike.
struct WarpTagged {
  static constexpr int lanes_of_warp = 32;
  static constexpr unsigned all_lanes = 0xFFFFFFFFu;
  static constexpr int values_a_word = 2;                                 ///< bf16
  static constexpr int piece_words = row_piece_values / values_a_word;    ///< what rows are divided by
  static constexpr int pairs_a_lane = piece_words / (2 * lanes_of_warp);  ///< of a piece
  static constexpr std::uint32_t looks_between_clocks = 64;

  const DeviceTeam& team;
  int rank;
  int lane;
  std::uint32_t epoch;

  /// A row's part of `words`, an even number, to each place that is not null; every store of a warp is 512 bytes in a row.
  template <class To>
  __device__ void send(int n, To to, const std::byte* from, int words, const RowPart& part) const {
    const auto* source = reinterpret_cast<const uint2*>(from);
    const int end = end_of(words, part);
#pragma unroll 1
    for (int base = begin_of(words, part); base < end; base += piece_words) {
      const int at = base + 2 * lane;
      uint2 data[pairs_a_lane];
#pragma unroll
      for (int j = 0; j < pairs_a_lane; ++j) {
        if (at + 2 * lanes_of_warp * j < end) data[j] = source[at / 2 + lanes_of_warp * j];
      }
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        Word* place = to(i);
        if (place == nullptr) continue;
#pragma unroll
        for (int j = 0; j < pairs_a_lane; ++j) {
          if (at + 2 * lanes_of_warp * j < end)
            ptx::store_relaxed_system(place + at + 2 * lanes_of_warp * j,
                                      {pack_word(epoch, data[j].x), pack_word(epoch, data[j].y)});
        }
      }
    }
  }
  template <class To, class Value>
  __device__ void send_values(int n, To to, int count, Value value) const {
#pragma unroll 1
    for (int at = lane; at < count; at += lanes_of_warp) {
      const Word word = pack_word(epoch, value(at));
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        Word* place = to(i);
        if (place != nullptr) ptx::store_relaxed_system(place + at, word);
      }
    }
    __syncwarp();
  }

  __device__ Taken take(std::byte* to, const TaggedRow& row, int words, const RowPart& part) const {
    const int end = end_of(words, part);
#pragma unroll 1
    for (int base = begin_of(words, part); base < end; base += piece_words) {
      const int at = base + 2 * lane;
      ptx::WordPair found[pairs_a_lane];
      const Taken taken = wait(row, [&](Word& late) {
#pragma unroll
        for (int j = 0; j < pairs_a_lane; ++j) {
          if (at + 2 * lanes_of_warp * j < end) found[j] = ptx::load_pair_relaxed_system(row.words + at + 2 * lanes_of_warp * j);
        }
        bool missing = false;
#pragma unroll
        for (int j = 0; j < pairs_a_lane; ++j) missing |= at + 2 * lanes_of_warp * j < end && is_late(found[j], late);
        return missing;
      });
      if (taken != Taken::here) return taken;
#pragma unroll
      for (int j = 0; j < pairs_a_lane; ++j) {
        if (at + 2 * lanes_of_warp * j < end)
          reinterpret_cast<uint2*>(to)[at / 2 + lanes_of_warp * j] =
              make_uint2(word_value(found[j].first), word_value(found[j].second));
      }
    }
    return Taken::here;
  }
  template <class F>
  __device__ Taken take_values(const TaggedRow& row, int first, int count, F f) const {
#pragma unroll 1
    for (int base = 0; base < count; base += lanes_of_warp) {
      const int at = base + lane;
      Word found = 0;
      const Taken taken = wait(row, [&](Word& late) {
        if (at >= count) return false;
        found = late = ptx::load_relaxed_system(row.words + first + at);
        return word_tag(found) != epoch;
      });
      if (taken != Taken::here) return taken;
      if (at < count) f(at, word_value(found));
    }
    __syncwarp();
    return Taken::here;
  }

  /// The sum of bf16 rows in their order, eight columns a lane as RowSum has them, two rows at a time; false on abort.
  template <class Rows>
  __device__ bool sum(bf16* out, int n, Rows rows, const SumFormat& format, const LastTerm& last, const RowPart& part) const {
    const int end = values_a_word * end_of(format.row.hidden / values_a_word, part);
#pragma unroll 1
    for (int base = values_a_word * begin_of(format.row.hidden / values_a_word, part); base < end; base += row_piece_values) {
      const int at = base + 8 * lane;
      float sums[chunks][8] = {};
#pragma unroll 1
      for (int first = 0; first < n; first += ahead) {
        if (!add_rows(first, n, rows, at, end, sums)) return false;
      }
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        if (at + chunk_values * c < end) RowSum<true>::finish_chunk(out, at + chunk_values * c, sums[c], format, last);
      }
    }
    return true;
  }

 private:
  static constexpr int ahead = 2;  ///< rows that are waited for together
  static constexpr int chunk_values = 8 * lanes_of_warp;
  static constexpr int chunks = row_piece_values / chunk_values;

  /// A part is whole pieces.
  __device__ static int begin_of(int words, const RowPart& part) {
    return part.begin((words + piece_words - 1) / piece_words) * piece_words;
  }
  __device__ static int end_of(int words, const RowPart& part) {
    return min(part.end((words + piece_words - 1) / piece_words) * piece_words, words);
  }
  /// `late` becomes a word that is not there yet.
  __device__ bool is_late(const ptx::WordPair& pair, Word& late) const {
    const bool first = word_tag(pair.first) != epoch;
    const bool second = word_tag(pair.second) != epoch;
    if (first || second) late = first ? pair.first : pair.second;
    return first || second;
  }

  /// Columns from `at` on of the rows [first, first + ahead) of n.
  template <class Rows>
  __device__ __forceinline__ bool add_rows(int first, int n, Rows& rows, int at, int end, float (&sums)[chunks][8]) const {
    const Word* words[ahead];
    ptx::WordPair found[ahead][chunks][2];
#pragma unroll
    for (int j = 0; j < ahead; ++j) words[j] = first + j < n ? rows(first + j).words : nullptr;
    int missing_row = 0;
    const auto look = [&](Word& late) {
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          if (words[j] == nullptr || at + chunk_values * c >= end) continue;
          const Word* from = words[j] + (at + chunk_values * c) / values_a_word;
          found[j][c][0] = ptx::load_pair_relaxed_system(from);
          found[j][c][1] = ptx::load_pair_relaxed_system(from + 2);
        }
      }
      bool missing = false;
#pragma unroll
      for (int j = ahead - 1; j >= 0; --j) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          if (words[j] == nullptr || at + chunk_values * c >= end) continue;
          const bool late_here = is_late(found[j][c][0], late) || is_late(found[j][c][1], late);
          if (late_here) missing_row = j;
          missing |= late_here;
        }
      }
      return missing;
    };
    const auto name = [&](int lane_of_row) { return rows(first + __shfl_sync(all_lanes, missing_row, lane_of_row)).name; };
    if (!wait_for(look, name, nullptr, 0)) return false;
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (words[j] == nullptr) continue;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const ptx::WordPair& pair = found[j][c][i / 2];
          const std::uint32_t values = word_value(i % 2 == 0 ? pair.first : pair.second);
          sums[c][2 * i] += float_from_bits(values << 16);
          sums[c][2 * i + 1] += float_from_bits(values & 0xFFFF0000u);
        }
      }
    }
    return true;
  }

  /// Looks until no lane misses a word. look(late): does this lane miss one, and what it saw there?
  template <class Look>
  __device__ Taken wait(const TaggedRow& row, Look look) const {
    bool none = false;
    const bool here = wait_for(
        look, [&](int) { return row.name; }, row.count, row.number, &none);
    return none ? Taken::none : here ? Taken::here : Taken::gave_up;
  }
  /// The same, false on abort. Where `count` is an announcement that there are at most `number` rows, *none becomes true instead.
  template <class Look, class NameOf>
  __device__ bool wait_for(Look look, NameOf name, const Word* count, int number, bool* none = nullptr) const {
    std::uint64_t since = 0;
#pragma unroll 1
    for (std::uint32_t looks = 1;; ++looks) {
      Word late = 0;
      const Word said = count != nullptr ? ptx::load_relaxed_system(count) : 0;
      const unsigned missing = __ballot_sync(all_lanes, look(late));
      if (missing == 0) return true;
      if (count != nullptr && agree(said, number)) {
        *none = true;
        return false;
      }
      if (looks % looks_between_clocks != 0) continue;
      const int teller = __ffs(static_cast<int>(missing)) - 1;
      const WordName missed = name(teller);
      const Word seen = __shfl_sync(all_lanes, late, teller);
      if (lane == 0) since = go_on_waiting(team, rank, since, missed, pack_word(epoch, 0), seen);
      since = __shfl_sync(all_lanes, since, 0);
      if (since == 0) return false;
    }
  }
  /// Do all lanes know that row `number` does not come? They may have seen the announcement at different moments.
  __device__ bool agree(Word said, int number) const {
    return __all_sync(all_lanes, word_tag(said) == epoch && announced_value(word_value(said)) <= number) != 0;
  }
};

}  // namespace heddle
