// Which placement is in force, and when it changes: decision, change and switch as both engines have them. How pairs are counted
// and weights moved is the engine's (docs/balancing.md has the argument why this is safe).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "balancing/board.hpp"
#include "heddle/balancing.hpp"

namespace heddle {

/// What a balancer asks of one member: a rank of the host engine, or a process with its GPUs. Called in the order of calls.
class BalancingEngine {
 public:
  virtual ~BalancingEngine() = default;

  /// Behind call number `call`: the number of a call that has ended here, in which this member heard from all live ranks. It
  /// follows from `call` alone, the same on all members. Throws what ended a call otherwise.
  virtual std::int64_t ended(std::int64_t call) = 0;
  virtual bool has_all_ranks() const = 0;  ///< none is masked
  virtual int most_arrivals() const = 0;   ///< experts that can come to a rank in one change; the same on all members

  /// Pairs counted up to the call under way are put aside; counting begins anew.
  virtual void put_counts_aside() = 0;
  /// Those, [experts], once that call has ended.
  virtual std::vector<std::int64_t> counts_aside() = 0;

  /// What this member has to copy for a change, and where it goes. Throws InputError where an expert has no copy on a live rank.
  virtual void plan(const ReplicaMap& from, const ReplicaMap& to) = 0;
  /// Up to so many bytes more; how many. Where others' cells are read or written, they have put in place what the last change
  /// brought.
  virtual std::uint64_t copy_some(std::size_t bytes) = 0;
  virtual bool has_copied_all() = 0;
  /// Copied weights into their cells, and the table of copies: for the calls from the next one on. How many experts came.
  virtual std::int64_t put_in_place(const ReplicaMap& to) = 0;
  /// Drops plans, counts, and copies under way: when it returns none of them touches anything.
  virtual void forget() = 0;
};

class Balancer {
 public:
  /// Collective over the live members. `members` and `engine` must outlive it; the map and the options are the same on all
  /// (check_balancing).
  Balancer(Group& members, BalancingEngine& engine, const ReplicaMap& first, const BalancingOptions& options);

  /// Behind every call, before the next one begins.
  void after_call();
  /// As BalancedLayer's. What brings more experts to a rank than can come in one change is gone to in several (part_way), as far as
  /// there is a way; InputError where there is none at all.
  void move_to(const ReplicaMap& map);
  bool is_moving() const { return change_.has_value(); }
  const ReplicaMap& map() const { return map_; }
  const BalancingOptions& options() const { return options_; }
  const BalancingReport& report() const { return report_; }
  /// After a fault, when the members have met again: as BalancedLayer's.
  void reset();
  void close() { board_.close(); }  ///< collective end

 private:
  struct Change {
    ReplicaMap goal;
    ReplicaMap to;           ///< on the way there
    std::int64_t began = 0;  ///< calls before it
    bool said_ready = false;
  };
  struct PendingLook {
    std::int64_t at = 0;               ///< calls that it looks at
    std::optional<std::int64_t> told;  ///< before which call all members tell their counts
  };
  bool begins_look() const;
  void go_on_looking(std::int64_t seen);
  void look();
  bool begin(const ReplicaMap& goal);
  void copy_some(std::int64_t seen);
  void say_if_ready();
  void switch_over();
  ReplicaMap put_in_force();

  Group& members_;
  BalancingEngine& engine_;
  BalancingOptions options_;
  ReplicaMap map_;
  BalancingBoard board_;
  std::optional<PendingLook> look_;
  std::optional<Change> change_;
  std::int64_t settled_ = 0;  ///< calls before the last switch
  BalancingReport report_;
};

}  // namespace heddle
