// In the place of CUTLASS's header: mbarriers and named barriers between the fibers of a CTA.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/device.hpp"

namespace heddle::emulator {

/// An mbarrier in the 8 bytes of the real one. A phase is over when all have arrived and all bytes have come.
struct Barrier {
  std::uint32_t expected : 12;
  std::uint32_t pending : 12;
  std::uint32_t phase : 8;
  std::int32_t bytes;

  static Barrier& at(std::uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }
  void settle() {
    if (pending == 0 && bytes == 0) {
      pending = expected;
      ++phase;
    }
    progress();
  }
};
static_assert(sizeof(Barrier) == 8);

}  // namespace heddle::emulator

namespace cutlass::arch {

struct ClusterBarrier {
  using Barrier = heddle::emulator::Barrier;
  static Barrier& of(const std::uint64_t* word) { return Barrier::at(const_cast<std::uint64_t*>(word)); }

  static void init(const std::uint64_t* word, std::uint32_t count) {
    of(word) = {count & 0xFFFu, count & 0xFFFu, 0, 0};
  }
  /// Until the phase of this parity is over.
  static void wait(const std::uint64_t* word, std::uint32_t parity) {
    while ((of(word).phase & 1u) == parity) heddle::emulator::yield("an mbarrier");
  }
  static bool test_wait(const std::uint64_t* word, std::uint32_t parity, std::uint32_t) { return (of(word).phase & 1u) != parity; }
  static void arrive(const std::uint64_t* word) {
    Barrier& barrier = of(word);
    --barrier.pending;
    barrier.settle();
  }
};

struct ClusterTransactionBarrier : ClusterBarrier {
  static void arrive_and_expect_tx(const std::uint64_t* word, std::uint32_t bytes) {
    of(word).bytes += static_cast<std::int32_t>(bytes);
    arrive(word);
  }
};

struct NamedBarrier {
  static void sync(std::uint32_t threads, std::uint32_t id) {
    heddle::emulator::meet(2 + id, static_cast<int>(threads), "a named barrier");
  }
  static void arrive(std::uint32_t threads, std::uint32_t id) { heddle::emulator::arrive(2 + id, static_cast<int>(threads)); }
};

inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}

}  // namespace cutlass::arch
