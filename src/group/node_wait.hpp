// Waiting for what only polling finds: short sleeps that grow, so that a rank that waits long leaves its core to others.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace heddle {

class PollPause {
 public:
  /// Sleeps; the first times it only yields.
  void rest() {
    if (++rests_ <= yields) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(2 * pause_, std::chrono::microseconds(500));
  }

 private:
  static constexpr int yields = 50;
  int rests_ = 0;
  std::chrono::microseconds pause_{20};
};

}  // namespace heddle
