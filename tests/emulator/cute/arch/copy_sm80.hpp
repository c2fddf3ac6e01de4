// In the place of CuTe's header: 16-byte copies that arrive when they are waited for.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "emulator/device.hpp"

namespace heddle::emulator {

struct SmallCopy {
  const void* from;
  void* to;
  bool real;  ///< else zeros
};
/// Of one thread: copies not yet committed, and committed groups in order.
struct SmallCopies {
  std::vector<SmallCopy> open;
  std::deque<std::vector<SmallCopy>> groups;
};
inline SmallCopies& small_copies() {
  static std::map<int, SmallCopies> all;
  return all[thread()];
}

}  // namespace heddle::emulator

namespace cute {

struct uint128_t {
  std::uint64_t half[2];
};

template <class From, class To = From>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL {
  static void copy(const From& from, To& to, bool real) { heddle::emulator::small_copies().open.push_back({&from, &to, real}); }
};

inline void cp_async_fence() {
  auto& copies = heddle::emulator::small_copies();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}

/// At most `left` groups are still under way afterwards.
template <int left>
void cp_async_wait() {
  auto& groups = heddle::emulator::small_copies().groups;
  while (groups.size() > static_cast<std::size_t>(left)) {
    for (const auto& copy : groups.front()) {
      if (copy.real) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    groups.pop_front();
  }
}

}  // namespace cute
