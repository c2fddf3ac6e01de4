// A CTA on the host: kernels compiled as plain C++ run here a fiber a thread, so that their logic is tested where no GPU is.
//
// What is asynchronous on the GPU is asynchronous here, and as late or as early as it may be: bulk copies arrive at a random
// moment, 16-byte copies when they are waited for, products read their registers and their shared memory when they are issued or
// only when they are waited for, as the test says. What the emulator does not know: proxies, memory order, registers, time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace heddle::emulator {

struct Index {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};

/// When products read what they multiply.
enum class Products : std::uint8_t { at_issue, at_wait };

struct Launch {
  int ctas = 1;
  int threads = 1;
  unsigned seed = 1;  ///< of the order in which threads run and copies arrive
  Products products = Products::at_wait;
};

/// Runs the CTAs one after another; `kernel` is called by every thread. Throws std::runtime_error, saying where every thread is, if
/// all wait for ever.
void launch(const Launch& launch, const std::function<void()>& kernel);

/// The order of threads is decided here: lets others run. `what` is told if nobody gets any further.
void yield(const char* what);
/// Tells that something has changed which a waiting thread may look for.
void progress();

/// All of `threads` threads that name the same barrier meet.
void meet(std::uintptr_t barrier, int threads, const char* what);
/// Counts as one of them, and does not wait.
void arrive(std::uintptr_t barrier, int threads);
/// Of the calling thread.
int thread();
Products products();

/// Every thread of a group of `size` (32 or 128) consecutive threads sees the values that all brought, until its next exchange.
const std::uint64_t* exchange(std::uint64_t mine, int size);

/// Executed at some later moment, in any order.
void later(std::function<void()> work);

}  // namespace heddle::emulator
