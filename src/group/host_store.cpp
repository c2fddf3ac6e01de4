#include "group/host_store.hpp"

#include <fmt/format.h>

#include <atomic>

#include "signal/doorbell.hpp"

namespace heddle {

Word& HostStore::word(const StoreKey& key) const {
  if (key.index < 0 || key.index >= control_.ranks)
    throw InputError(fmt::format("word {} of the store of {} ranks", key.index, control_.ranks));
  RankControl& at = part(key.index);
  switch (key.kind) {
    case StoreKey::Kind::mask:
      return at.mask;
    case StoreKey::Kind::here:
      return at.here;
    case StoreKey::Kind::finished:
      return at.finished;
    case StoreKey::Kind::unheard:
      return at.unheard;
    case StoreKey::Kind::asked:
      return part(0).asked;
    case StoreKey::Kind::called:
      break;
  }
  return part(0).called;
}

std::uint64_t HostStore::get(const StoreKey& key) const { return std::atomic_ref<Word>(word(key)).load(); }

bool HostStore::compare_set(const StoreKey& key, std::uint64_t& expected, std::uint64_t desired) {
  if (!std::atomic_ref<Word>(word(key)).compare_exchange_strong(expected, desired)) return false;
  for (int rank = 0; rank < control_.ranks; ++rank) ring(part(rank).header);
  return true;
}

bool HostStore::wait(const std::function<bool()>& there, Clock::time_point end) {
  const Doorbell bell(part(control_.rank).header);
  for (;;) {
    const std::uint32_t rung = bell.read();
    if (there()) return true;
    const auto left = end - Clock::now();
    if (left <= std::chrono::nanoseconds(0)) return false;
    bell.sleep(rung, left);
  }
}

}  // namespace heddle
