// An expert that lies in several pieces, taken as one run of bytes.
#pragma once

#include <algorithm>
#include <cstddef>

namespace heddle {

/// visit(at, begin, count) for each run of bytes [offset, offset + bytes) of the pieces (spans, one thought behind the other) that
/// lies in one of them: `count` bytes at `at`, which are the ones from `begin` on of all.
template <class Pieces, class Visit>
void for_runs(const Pieces& pieces, std::size_t offset, std::size_t bytes, const Visit& visit) {
  std::size_t before = 0;
  for (const auto& piece : pieces) {
    const std::size_t begin = std::max(offset, before), end = std::min(offset + bytes, before + piece.size());
    if (begin < end) visit(piece.data() + (begin - before), begin, end - begin);
    before += piece.size();
  }
}

template <class Pieces>
std::size_t bytes_of(const Pieces& pieces) {
  std::size_t sum = 0;
  for (const auto& piece : pieces) sum += piece.size();
  return sum;
}

}  // namespace heddle
