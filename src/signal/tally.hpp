// Counters that a kernel writes and the host copies whenever it likes, without waiting for each other: every word carries,
// beside half a value, the number of the call that wrote it. A set of counters whose words all have one number is whole;
// any other is copied again. So nothing orders the kernel's stores or the copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "signal/words.hpp"

namespace heddle {

/// A counter: what the last call added, and the sum over all calls; the lower half of each first.
struct Tally {
  Word last[2] = {};
  Word sum[2] = {};

  HEDDLE_HOST_DEVICE std::uint32_t call() const { return word_tag(sum[0]); }
  HEDDLE_HOST_DEVICE static std::uint64_t value(const Word (&halves)[2]) {
    return static_cast<std::uint64_t>(word_value(halves[1])) << 32 | word_value(halves[0]);
  }
  /// This counter after another call. Looks at `sum` alone.
  HEDDLE_HOST_DEVICE Tally after(std::uint64_t added) const {
    const std::uint32_t tag = call() + 1;
    const std::uint64_t total = value(sum) + added;
    const auto high = [](std::uint64_t whole) { return static_cast<std::uint32_t>(whole >> 32); };
    return {{pack_word(tag, static_cast<std::uint32_t>(added)), pack_word(tag, high(added))},
            {pack_word(tag, static_cast<std::uint32_t>(total)), pack_word(tag, high(total))}};
  }
};

/// Were all counters of a set written by one call?
inline bool is_whole(std::span<const Tally> set) {
  for (const Tally& tally : set) {
    for (const Word word : {tally.last[0], tally.last[1], tally.sum[0], tally.sum[1]}) {
      if (word_tag(word) != set[0].call()) return false;
    }
  }
  return true;
}

/// The counters of one rank: a set that dispatch writes, then one that combine writes.
struct TallyPlan {
  int ranks = 0;    ///< of the group
  int sent = 0;     ///< counters of rows sent: to ranks, or to all experts of the group
  int experts = 0;  ///< local experts
  bool sent_to_experts = false;
  bool experts_by_combine = false;  ///< combine writes those of experts

  // Dispatch: calls, nanoseconds waited, rows sent, rows arrived [ranks].
  HEDDLE_HOST_DEVICE int arrived_at() const { return 2 + sent; }
  HEDDLE_HOST_DEVICE int dispatch_size() const { return arrived_at() + ranks + (experts_by_combine ? 0 : experts); }
  // Combine: calls, nanoseconds waited.
  HEDDLE_HOST_DEVICE int combine_at() const { return dispatch_size(); }
  HEDDLE_HOST_DEVICE int combine_size() const { return 2 + (experts_by_combine ? experts : 0); }
  // Rows of each local expert end one of the sets.
  HEDDLE_HOST_DEVICE int experts_at() const { return experts_by_combine ? combine_at() + 2 : arrived_at() + ranks; }
  HEDDLE_HOST_DEVICE int size() const { return combine_at() + combine_size(); }
};

}  // namespace heddle
