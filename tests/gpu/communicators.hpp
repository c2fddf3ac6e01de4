// NCCL's communicators for a test, or the reason why there are none, and an end to NCCL's calls, which have no deadline of their
// own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "gpu/buffers.hpp"
#include "heddle/device.hpp"
#include "heddle/error.hpp"

namespace heddle {

/// Ends the program if it is not destroyed in time.
class Watchdog {
 public:
  explicit Watchdog(std::string what)
      : thread_([this, what = std::move(what)] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (done_.wait_for(lock, std::chrono::seconds(90), [this] { return over_; })) return;
          std::fprintf(stderr, "hangs for 90 s: %s\n", what.c_str());
          std::_Exit(1);
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    done_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;  // last: it uses the others
};

/// Of so many GPUs. Null, with the reason, where this machine or this build has no NCCL. Multicast stays off, as in the benchmark.
inline std::shared_ptr<NcclCommunicators> communicators(int gpus, std::string& reason) {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  try {
    return std::make_shared<NcclCommunicators>(devices(gpus));
  } catch (const InputError& error) {
    reason = error.what();
    return nullptr;
  }
}

#define COMMUNICATORS_OR_SKIP(name, gpus)           \
  SKIP_WITHOUT_GPU();                               \
  const Watchdog watchdog("the test's NCCL calls"); \
  std::string reason;                               \
  const auto name = communicators(gpus, reason);    \
  if (name == nullptr) GTEST_SKIP() << reason

}  // namespace heddle
