#include "explorer/coroutine.hpp"

#include <cstdint>
#include <utility>

namespace heddle::explorer {

// The first entry goes through ucontext, which knows how to change stacks; every later switch is a
// pair of _setjmp and _longjmp, which unlike swapcontext make no system call.

Coroutine::Coroutine() : stack_(new std::byte[stack_bytes]) {}

void Coroutine::start(std::function<void()> body) {
  body_ = std::move(body);
  entered_ = false;
  finished_ = false;
  getcontext(&entry_);
  entry_.uc_stack.ss_sp = stack_.get();
  entry_.uc_stack.ss_size = stack_bytes;
  entry_.uc_link = nullptr;
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&entry_, reinterpret_cast<void (*)()>(&Coroutine::enter), 2, static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self & 0xFFFFFFFFu));
}

void Coroutine::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Coroutine*>(static_cast<std::uintptr_t>(high) << 32 | low);
  self->body_();
  self->finished_ = true;
  _longjmp(self->outside_, 1);
}

void Coroutine::resume() {
  if (_setjmp(outside_) != 0) return;
  if (entered_) _longjmp(inside_, 1);
  entered_ = true;
  setcontext(&entry_);
}

void Coroutine::suspend() {
  if (_setjmp(inside_) == 0) _longjmp(outside_, 1);
}

}  // namespace heddle::explorer
