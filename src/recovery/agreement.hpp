// How survivors agree on who is left: roll calls over the store of a group (docs/recovery.md). Every generation has one mask,
// decided by compare-and-set; a rank is in it only if it came to that roll call.
//
// All that decides lies in the store. A rank may be stopped or die between any two accesses; the others need nothing of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "heddle/recovery.hpp"
#include "heddle/store.hpp"

namespace heddle {

/// How long a roll call waits for a rank: for one that an error has named, for those of its node where nobody of that has come, and
/// for any other.
struct Patience {
  std::chrono::nanoseconds suspects{};
  std::chrono::nanoseconds others{};
  std::chrono::nanoseconds mates = others;
};

class Agreement {
 public:
  /// A rank that enters together with all others, in generation 0. `ranks_a_node`: where ranks are on several nodes.
  Agreement(Store& store, int rank, int ranks, std::optional<int> ranks_a_node = {});

  const Members& members() const { return members_; }
  std::uint32_t finished() const { return finished_; }  ///< steps

  /// Is there a roll call to go to? One that has begun without this rank; or, once a step is finished under this mask, one that a
  /// rank which is out asks for. Such a rank never comes before the others' next step, however often it asks.
  bool should_meet() const;
  /// Calls all ranks to the next one.
  void call();

  enum class Finish : std::uint8_t { all, called, late };
  /// This rank has finished a step. Waits until all members have, somebody calls, or a deadline has passed.
  Finish finish(std::chrono::nanoseconds deadline);
  /// Members that have not finished the step that this rank has.
  std::vector<bool> unfinished() const;

  /// The roll call after this rank's generation: comes to it, waits for the others, decides or sees what was decided. Afterwards
  /// finished() is what all members have finished: a step more or less than before is none that any of them has left behind.
  /// Throws LostRankError where the others decided without this rank.
  void settle(const std::vector<bool>& suspects, const Patience& patience);
  /// For a rank that is not in: comes to the next roll call, whichever that is. Throws FaultError if nobody holds one.
  void join(std::chrono::nanoseconds patience);

 private:
  using Kind = StoreKey::Kind;
  std::uint64_t get(Kind kind, int index) const { return store_.get({kind, index}); }
  int chunks() const { return (ranks_ + 31) / 32; }
  void publish(Kind kind, std::uint64_t& last, std::uint32_t generation);
  void raise(Kind kind, std::uint32_t generation);
  bool called() const { return get(Kind::called, 0) > members_.generation; }
  bool came(int rank, std::uint32_t generation) const;
  bool decided(std::uint32_t generation) const;
  void hold(std::uint32_t generation, const std::vector<bool>& suspects, const Patience& patience);
  std::vector<bool> mates_missing(const std::vector<bool>& suspects, std::uint32_t generation) const;
  void propose(std::uint32_t generation);
  std::vector<bool> cut_off(std::uint32_t generation) const;
  bool adopt(std::uint32_t generation);
  Members masked() const;
  LostRankError lost() const;

  Store& store_;
  int rank_, ranks_, ranks_a_node_;
  Members members_;
  std::uint32_t finished_ = 0;
  std::uint32_t adopted_at_ = 0;             ///< the step at which this mask's members went on
  bool late_ = false;                        ///< this rank does not know yet how many steps are finished
  std::optional<std::uint32_t> awaited_;     ///< the roll call that this process came to in join()
  std::uint64_t here_word_, finished_word_;  ///< this rank's own, as it left them
};

}  // namespace heddle
