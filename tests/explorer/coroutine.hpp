// A function on a stack of its own that can be left and entered again: how the explorer holds many
// workers in one thread. No exception may leave the function.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace heddle::explorer {

class Coroutine {
 public:
  Coroutine();
  Coroutine(const Coroutine&) = delete;
  Coroutine& operator=(const Coroutine&) = delete;

  /// A new body, entered by the next resume(). The previous one must have finished.
  void start(std::function<void()> body);
  /// Runs the body until it suspends or ends.
  void resume();
  /// Called by the body: back to whoever resumed it.
  void suspend();
  bool finished() const { return finished_; }

 private:
  static void enter(unsigned high, unsigned low);
  static constexpr std::size_t stack_bytes = std::size_t{256} * 1024;

  std::unique_ptr<std::byte[]> stack_;
  std::function<void()> body_;
  ucontext_t entry_{};
  jmp_buf inside_{};
  jmp_buf outside_{};
  bool entered_ = false;
  bool finished_ = true;
};

}  // namespace heddle::explorer
