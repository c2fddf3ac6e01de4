// One run of a scenario: every worker of every rank is a coroutine that stops before each verb that
// touches the heap; a strategy says who goes on, and which of the values a verb may see it sees.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "explorer/coroutine.hpp"
#include "explorer/memory.hpp"
#include "explorer/verb.hpp"
#include "heddle/group.hpp"

namespace heddle::explorer {

class Machine;

/// A program for some ranks. begin() makes its ordinary memory as new before every run.
class Scenario {
 public:
  virtual ~Scenario() = default;
  virtual std::string name() const = 0;
  virtual int ranks() const = 0;
  virtual int workers_a_rank() const { return 1; }
  /// Workers of a rank that dispatch, where the others have another role and are a team of their own; 0: all are of one role.
  virtual int dispatchers() const { return 0; }
  virtual bool live(int) const { return true; }
  virtual std::size_t part_bytes() const = 0;
  /// Plain memory of a part from here on starts as poison instead of zeros.
  virtual std::size_t poisoned() const { return part_bytes(); }
  virtual void begin() = 0;
  /// What one worker of one rank does. Violations are found by the verbs or told by machine.violate().
  virtual void work(Machine& machine, int rank, int index) = 0;
  /// After a run in which every worker came to its end.
  virtual void end() {}
  virtual std::string describe(std::size_t offset_in_part) const;
};

/// Who goes on, and what is seen.
class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual void start_run() {}
  /// One of the workers in `enabled` (bits), or -1: this run need not be finished.
  virtual int pick(const Machine& machine, std::uint32_t enabled) = 0;
  /// Which of `alternatives` >= 2; 0 is what a schedule without late writes shows.
  virtual int choose(int alternatives) = 0;
};

struct Options {
  bool races = true;        ///< accesses that nothing orders are violations; false: they may see stale values
  bool late_words = true;   ///< a look at a word may see an older value of it, as far as memory order allows
  bool late_copies = true;  ///< copies are under way until completed; false: done when the verb returns
  bool every_verb = false;  ///< verbs on ordinary memory are points of choice as well
  int most_steps = 20000;
};

struct Violation {
  std::string what;
  std::string schedule;  ///< for replay()
  std::string trace;     ///< the steps, for people
};

struct Outcome {
  bool finished = false;  ///< false without a violation: the strategy gave the run up
  std::optional<Violation> violation;
};

class Machine {
 public:
  Machine(Scenario& scenario, const Options& options);
  ~Machine();
  Outcome run(Strategy& strategy);

  const Options& options() const { return options_; }
  int workers() const { return static_cast<int>(workers_.size()); }
  const std::vector<Step>& steps() const { return steps_; }
  int step_count() const { return step_count_; }
  /// The next verb of a worker that has not ended.
  const Verb& pending(int worker) const { return workers_[static_cast<std::size_t>(worker)].verb; }
  /// The last steps of its team before a worker's enabled barrier.
  const std::vector<int>& before_barrier(int worker) const;
  /// Could the waiting `verb` have ended without the earlier `store`?
  bool reversible(const Verb& store, const Verb& verb) const;

  // For the verbs.
  HeapMemory& memory() { return memory_; }
  HeapView view(int rank) const;
  bool live(int rank) const { return scenario_.live(rank); }
  int rank_size() const { return scenario_.workers_a_rank(); }
  /// The team of one of a rank's workers: how many are in it, and which of the rank's is its first.
  int team_size(int index) const { return dispatches(index) ? scenario_.dispatchers() : rank_size() - scenario_.dispatchers(); }
  int team_begin(int index) const { return dispatches(index) ? 0 : scenario_.dispatchers(); }
  int worker_id(int rank, int index) const { return rank * scenario_.workers_a_rank() + index; }
  /// Is this an address beside the heap, where nothing is?
  bool misses_heap(const void* address) const;
  Range range(const void* address, std::size_t bytes) const;
  Verb& prepare(int worker, VerbKind kind);
  /// Stops the worker until it is chosen; then its verb happens.
  void step(int worker);
  int now() const { return step_count_ - 1; }
  Verb& happening() { return steps_[static_cast<std::size_t>(step_count_ - 1)].verb; }
  int choose(int alternatives);
  /// Which barrier: that of a worker's team, or that of all workers of its rank.
  enum class Meeting : std::uint8_t { team, rank };
  void arrive(int worker, Meeting meeting);
  void pass(int worker);
  /// Is this worker the last of its team? It then knows what all did before.
  bool arrive_last(int worker);
  [[noreturn]] void violate(const std::string& what);
  std::string describe(std::size_t heap_offset) const;
  std::string worker_name(int worker) const;

 private:
  struct Cancelled {};
  struct WorkerState {
    Coroutine coroutine;
    Verb verb;
    int steps = 0;
    int last_step = -1;
  };
  /// A barrier of some of one rank's workers; two generations may be in use at a time.
  struct Team {
    int size = 1;
    int arrived = 0;
    std::uint64_t generation = 0;
    Clock gathering;
    Clock passed[2];
    std::vector<int> steps_gathering;
    std::vector<int> steps_passed[2];
    int done = 0;  ///< workers that arrived without waiting
    Clock known_to_last;
  };
  void start_workers();
  bool enabled(int worker) const;
  std::uint32_t enabled_workers() const;
  void execute(int worker);
  void cancel();
  Violation report() const;
  std::string deadlock() const;
  std::string schedule() const;
  std::string trace() const;
  std::string describe(const Step& step) const;
  bool dispatches(int index) const { return index < scenario_.dispatchers(); }
  /// A rank's teams: all its workers, those that dispatch, the others.
  std::size_t team_of(int worker, Meeting meeting) const {
    const int rank = worker / rank_size();
    const int which = meeting == Meeting::rank ? 0 : (dispatches(worker % rank_size()) ? 1 : 2);
    return static_cast<std::size_t>(3 * rank + which);
  }
  void start_teams();
  Team& team(std::size_t index) { return teams_[index]; }
  const Team& team(std::size_t index) const { return teams_[index]; }
  /// The barrier that a worker is at.
  const Team& barrier_of(int worker) const { return team(workers_[static_cast<std::size_t>(worker)].verb.team); }

  Scenario& scenario_;
  Options options_;
  std::size_t stride_;
  std::byte* base_;
  HeapMemory memory_;
  std::vector<WorkerState> workers_;
  std::vector<Team> teams_;
  std::vector<Step> steps_;
  int step_count_ = 0;
  Strategy* strategy_ = nullptr;
  bool cancelled_ = false;
  std::optional<std::string> violation_;
};

}  // namespace heddle::explorer
