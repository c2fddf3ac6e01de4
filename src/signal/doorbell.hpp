// How a host worker sleeps until a word in its rank's part changes: every publisher rings the part's
// doorbell after its store, and a waiter that has read the doorbell before it looked at its word
// cannot miss the ring. Works across processes (no private futexes).
#pragma once

#include <chrono>
#include <cstdint>

#include "signal/words.hpp"

namespace heddle {

class NodeLink;

/// After a store that somebody may wait for.
void ring(HeapHeader& part);

/// Announces a waiter. Read the doorbell, look at the word, then sleep with what was read.
class Doorbell {
 public:
  /// `link`: where there is one, it makes progress before each sleep, and sleeps are short while it has to.
  explicit Doorbell(HeapHeader& part, NodeLink* link = nullptr);
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;
  std::uint32_t read() const;
  /// Returns when the doorbell no longer shows `seen`, when `longest` has passed, or earlier.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest) const;

 private:
  HeapHeader& part_;
  NodeLink* link_;
};

}  // namespace heddle
