// The control segment: where ranks meet outside of any protocol (creation, configuration, reset).
// A rank's part begins with a HeapHeader for its doorbell; the rest is its arrivals and its text.
#pragma once

#include <cstdint>

#include "signal/words.hpp"

namespace heddle {

constexpr std::size_t control_text_bytes = 4000;

struct RankControl {
  HeapHeader header;
  Word arrived = 0;     ///< barriers this rank has reached since the last reset
  Word generation = 0;  ///< era << 32 | meetings of resets that this rank has begun in it
  // Words of the store (host_store.hpp); `called` and `asked` of part 0 alone.
  Word called = 0;
  Word asked = 0;
  Word mask = 0;
  Word here = 0;
  Word finished = 0;
  Word unheard = 0;
  std::uint32_t text_length = 0;
  char text[control_text_bytes] = {};
};

constexpr std::size_t control_stride = align_up(sizeof(RankControl), 4096);

}  // namespace heddle
