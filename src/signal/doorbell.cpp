#include "signal/doorbell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>

#include "heddle/nodes.hpp"

namespace heddle {

// Sequential consistency on doorbell and sleepers: either the ringer sees the sleeper, or the
// sleeper sees the ring.
void ring(HeapHeader& part) {
  std::atomic_ref<std::uint32_t>(part.doorbell).fetch_add(1);
  if (std::atomic_ref<std::uint32_t>(part.sleepers).load() != 0) {
    syscall(SYS_futex, &part.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

Doorbell::Doorbell(HeapHeader& part, NodeLink* link) : part_(part), link_(link) {
  std::atomic_ref<std::uint32_t>(part_.sleepers).fetch_add(1);
}
Doorbell::~Doorbell() { std::atomic_ref<std::uint32_t>(part_.sleepers).fetch_sub(1); }

std::uint32_t Doorbell::read() const { return std::atomic_ref<std::uint32_t>(part_.doorbell).load(); }

void Doorbell::sleep(std::uint32_t seen, std::chrono::nanoseconds longest) const {
  const bool is_driven = link_ != nullptr && link_->progress();
  // A slice bounds the wait even where a killed process left the counts wrong. A link that has to be driven does not ring.
  const std::chrono::milliseconds most(is_driven ? 1 : 50);
  const auto slice = std::clamp<std::chrono::nanoseconds>(longest, std::chrono::microseconds(1), most);
  timespec timeout{};
  timeout.tv_nsec = static_cast<long>(slice.count());
  syscall(SYS_futex, &part_.doorbell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace heddle
