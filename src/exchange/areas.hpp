// Where a way's data lies in every rank's part: header | words | dispatch | combine | outputs.
// All ways that share a workspace use the same three data areas, so that a round trip of one way may
// follow that of another: words carry epochs, and what protects an area protects it whatever the way.
//
// Why no area is ever overwritten too early, for every way (two rendezvous a round trip):
//   D: in dispatch every rank, also one without tokens or experts, hears from every live rank; C: in combine likewise.
//   - dispatch area of call n+1 at rank d is written after C of call n, which d enters after its
//     experts have read what call n left there;
//   - combine area of call n+1 is written after D of call n+1, which d enters after call n returned;
//   - words of call n+1 are written after D or C of call n likewise, so a word never runs ahead of its reader.
#pragma once

#include <cstddef>

#include "signal/words.hpp"

namespace heddle {

struct Areas {
  std::size_t words = heap_header_bytes;
  std::size_t dispatch = 0;
  std::size_t combine = 0;
  std::size_t outputs = 0;
  std::size_t end = 0;
};

/// Words any way may need: one an expert and source, and a few a rank. Independent of the cap.
constexpr std::size_t word_area_bytes(int ranks, int max_local_experts) {
  const auto r = static_cast<std::size_t>(ranks);
  return align_up(sizeof(Word) * r * (static_cast<std::size_t>(max_local_experts) + 8), 128);
}

/// Areas with room for the largest of each kind.
constexpr Areas place_areas(int ranks, int max_local_experts, std::size_t dispatch_bytes, std::size_t combine_bytes,
                            std::size_t output_bytes) {
  Areas areas;
  areas.dispatch = areas.words + word_area_bytes(ranks, max_local_experts);
  areas.combine = areas.dispatch + align_up(dispatch_bytes, 128);
  areas.outputs = areas.combine + align_up(combine_bytes, 128);
  areas.end = areas.outputs + align_up(output_bytes, 128);
  return areas;
}

/// The sizes that every layout is computed from; the same on all ranks.
struct ExchangeShape {
  int ranks = 1;
  int experts = 0;
  int max_local_experts = 0;  ///< most experts of any rank
  int topk = 1;
  int cap = 0;                ///< most tokens a rank may bring
};

/// Bytes of a row's routing: k ids and k weights, padded so that rows stay aligned.
HEDDLE_HOST_DEVICE constexpr std::size_t routing_bytes(int topk) {
  return align_up(static_cast<std::size_t>(topk) * (sizeof(std::int32_t) + sizeof(float)), 16);
}

}  // namespace heddle
