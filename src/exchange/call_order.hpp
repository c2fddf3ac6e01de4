// A combine ends the round trip that a dispatch of the same exchange began. Without one it would find the words of the call
// before, take them for its own and return old sums; so who calls in the wrong order is told.
#pragma once

#include <string>
#include <string_view>

#include "heddle/error.hpp"

namespace heddle {

/// What an exchange's host side knows of the order of its calls. A call that is captured in a graph runs when the graph is
/// replayed, which nobody sees here: it neither begins nor ends a round trip, and once a dispatch was captured any combine may
/// follow a replay of it.
class CallOrder {
 public:
  void dispatch(bool captured) {
    if (captured) {
      replayed_ = true;
    } else {
      dispatched_ = true;
    }
  }
  /// Before either half of combine. Throws InputError where no dispatch came before.
  void need_dispatch(bool captured, std::string_view way) const {
    if (dispatched_ || replayed_ || captured) return;
    throw InputError("way " + std::string(way) +
                     ": combine without a dispatch before it; each combine ends the round trip that one dispatch of the same "
                     "exchange began");
  }
  /// The last half of combine begins.
  void combine(bool captured) {
    if (!captured) dispatched_ = false;
  }
  /// A half has failed: the round trip is over.
  void fail() { dispatched_ = false; }

 private:
  bool dispatched_ = false;  ///< and not combined
  bool replayed_ = false;    ///< perhaps, by a graph
};

}  // namespace heddle
