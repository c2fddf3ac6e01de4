// Where a way's data lies in every rank's part: header | words | dispatch | combine | outputs, and words of single ways behind.
// All ways that share a workspace use the same three data areas, so that a round trip of one way may
// follow that of another: words carry epochs, and what protects an area protects it whatever the way.
//
// Why no area is ever overwritten too early, for every way (two rendezvous a round trip):
//   D: in dispatch every rank, also one without tokens or experts, hears from every live rank; C: in combine likewise.
//   - dispatch area of call n+1 at rank d is written after C of call n, which d enters after its
//     experts have read what call n left there;
//   - combine area of call n+1, and what a rank offers others to pull, is written after D of call n+1,
//     which d enters after call n returned;
//   - words: who has passed C of call n may announce call n+1 while d has not looked at its combine words
//     of call n yet; d has left D, though. So dispatch and combine have words apart, whatever the way.
//     Combine words of call n+1 are written after D of call n+1, and the outputs' area and words after C.
//   - rank p alone writes the words at place p of a row, in its own order, so no late write can undo a newer one.
#pragma once

#include <cstddef>

#include "signal/words.hpp"

namespace heddle {

struct Areas {
  std::size_t words = heap_header_bytes;
  std::size_t dispatch = 0;
  std::size_t combine = 0;
  std::size_t outputs = 0;     ///< behind them words and sums of the fused layer, then rows as words (ExchangeMemory)
  std::size_t mega_words = 0;  ///< where nothing but words ever lies
  std::size_t mega_sums = 0;   ///< where only the fused layer adds
  std::size_t end = 0;
};

/// Rows of the word area, a block of words a peer in each: one for every squad that the peer may have (on the host a
/// rank is one squad). Every phase has rows of its own, the same for all ways.
enum WordRow : int {
  all_gather_words = 0,
  combine_words = 1,   ///< two rows: normal's queues back have two ends
  dispatch_words = 3,  ///< three rows
  word_rows = 6,
};
constexpr int most_squads = 160;
static_assert(most_squads < 256, "an announcement has eight bits for the number of squads");

/// Offset of the words of `peer` in a row of the word area.
HEDDLE_HOST_DEVICE constexpr std::size_t word_at(const Areas& areas, int ranks, int row, int peer) {
  return areas.words + sizeof(Word) * most_squads *
                           (static_cast<std::size_t>(row) * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(peer));
}

/// Bytes of all word rows. Independent of the cap.
constexpr std::size_t word_area_bytes(int ranks) {
  return align_up(sizeof(Word) * word_rows * most_squads * static_cast<std::size_t>(ranks), 128);
}

/// Areas with room for the largest of each kind.
constexpr Areas place_areas(int ranks, std::size_t dispatch_bytes, std::size_t combine_bytes, std::size_t output_bytes) {
  Areas areas;
  areas.dispatch = areas.words + word_area_bytes(ranks);
  areas.combine = areas.dispatch + align_up(dispatch_bytes, 128);
  areas.outputs = areas.combine + align_up(combine_bytes, 128);
  areas.mega_words = areas.outputs + align_up(output_bytes, 128);
  areas.mega_sums = areas.end = areas.mega_words;
  return areas;
}

/// The sizes that every layout is computed from; the same on all ranks.
struct ExchangeShape {
  int ranks = 1;
  int experts = 0;
  int max_local_experts = 0;  ///< most experts of any rank
  int topk = 1;
  int cap = 0;  ///< most tokens a rank may bring
};

/// Bytes of a row's routing: k ids and k weights, padded so that rows stay aligned.
HEDDLE_HOST_DEVICE constexpr std::size_t routing_bytes(int topk) {
  return align_up(static_cast<std::size_t>(topk) * (sizeof(std::int32_t) + sizeof(float)), 16);
}

}  // namespace heddle
