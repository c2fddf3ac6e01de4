// Words: what one rank writes and another waits for. A word carries the epoch of its call beside its
// value (tag << 32 | value), so words are never zeroed between calls and any order of graph replays
// works. Every word a protocol waits for has a kind here, which names it in errors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/formats.hpp"

namespace heddle {

using Word = std::uint64_t;

HEDDLE_HOST_DEVICE constexpr Word pack_word(std::uint32_t tag, std::uint32_t value) { return static_cast<Word>(tag) << 32 | value; }
HEDDLE_HOST_DEVICE constexpr std::uint32_t word_tag(Word word) { return static_cast<std::uint32_t>(word >> 32); }
HEDDLE_HOST_DEVICE constexpr std::uint32_t word_value(Word word) { return static_cast<std::uint32_t>(word); }

/// Which word of which protocol. The texts are in word_text (fault.cpp); keep both in one order.
enum class WordKind : std::uint32_t {
  none,
  refused,  ///< no word: a rank refused its input
  failed,   ///< no word: a rank left a call by an exception
  team,     ///< the barrier of one rank's workers
  gather_count,
  gather_arrived,
  gather_reduced,
  gather_partial,
  normal_count,
  normal_tail,
  normal_head,
  normal_return_tail,
  normal_return_head,
  low_latency_arrived,
  low_latency_returned,
  elastic_count,
  elastic_returned,
  elastic_node_rows,     ///< no word: a message between nodes
  elastic_node_results,  ///< likewise, on the way back
  one_sided_arrived,
  one_sided_ready,
  all_gather_arrived,
  mega_announced,
  mega_row_count,
  mega_counted,
  mega_filled,
  mega_freed,
  mega_step,
  mega_shared_step,
  mega_ready,
};

/// A word in an error: its kind, the rank that should write it and an index (an expert, a row).
struct WordName {
  WordKind kind = WordKind::none;
  std::int32_t peer = -1;
  std::int32_t index = -1;
};

/// What a rank leaves in its part before it writes the abort words.
struct FaultRecord {
  WordName name;
  std::int32_t rank = -1;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
};

/// The first bytes of every rank's part of a heap. Protocol words follow at offsets that depend on
/// the number of ranks alone.
struct alignas(128) HeapHeader {
  Word abort = 0;              ///< 0, or 1 + the rank whose fault record tells why
  Word epoch = 0;              ///< the last one used up, see CallPart
  Word call = 0;               ///< that of the call whose dispatch this rank began last
  Word team = 0;               ///< host: arrivals at the barrier of this rank's workers
  std::uint32_t arrivals = 0;  ///< host: workers of this rank that have done their part of a sending half
  std::uint32_t doorbell = 0;  ///< host: rung whenever a word in this part changes
  std::uint32_t sleepers = 0;  ///< host: workers waiting at the doorbell
  FaultRecord fault;
};

constexpr std::size_t align_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }
constexpr std::size_t heap_header_bytes = align_up(sizeof(HeapHeader), 128);

struct WordText {
  const char* phase;
  const char* word;
};
WordText word_text(WordKind kind);

}  // namespace heddle
