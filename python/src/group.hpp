// A group as Python holds it: shared by all that is made of it, used by one thread at a time.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "heddle/group.hpp"

namespace heddle::python {

/// One rank's membership. Calls run without the GIL, so a second thread could come in: it is refused.
class RankGroup {
 public:
  explicit RankGroup(std::unique_ptr<Group> group) : group_(std::move(group)) {}
  Group& group() { return *group_; }

  /// One thread's turn, from here to the end of the scope.
  class Turn {
   public:
    Turn(RankGroup& of, const char* what) : of_(of) {
      if (!of_.busy_.test_and_set(std::memory_order_acquire)) return;
      throw InputError(fmt::format("{} on rank {}: another thread is inside a call of this rank; give every rank a thread of its own",
                                   what, of_.group_->rank()));
    }
    ~Turn() { of_.busy_.clear(std::memory_order_release); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    RankGroup& of_;
  };

 private:
  std::unique_ptr<Group> group_;
  std::atomic_flag busy_;
};

}  // namespace heddle::python
