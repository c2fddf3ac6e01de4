// What Python objects share: ends without the interpreter's lock, and turns of threads.
#pragma once

#include <fmt/format.h>
#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "heddle/error.hpp"

namespace heddle::python {

/// As std::make_shared, but whoever lets go last does so without the interpreter's lock, be it held or not: an end may wait for a
/// GPU whose kernels wait for those of another one, which a thread can only launch when it gets the lock.
template <class T, class... Arguments>
std::shared_ptr<T> make_shared_unlocked(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), [](T* object) {
            const nanobind::gil_scoped_acquire held;
            const nanobind::gil_scoped_release others_run;
            delete object;
          }};
}

/// What one thread at a time uses. Calls run without the interpreter's lock, so that a second one could come in.
struct Place {
  Place(std::string of_kind, std::string of_name) : kind(std::move(of_kind)), name(std::move(of_name)) {}
  std::string kind;  ///< "rank"
  std::string name;  ///< "rank 3"
  std::atomic_flag busy;
};

/// One thread's turn, from here to the end of the scope. Throws InputError where another one has it.
class Turn {
 public:
  Turn(Place& place, const char* what) : place_(place) {
    if (!place_.busy.test_and_set(std::memory_order_acquire)) return;
    throw InputError(fmt::format("{0} on {1}: another thread is inside a call of this {2}; give every {2} a thread of its own",
                                 what, place_.name, place_.kind));
  }
  ~Turn() { place_.busy.clear(std::memory_order_release); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Place& place_;
};

}  // namespace heddle::python
