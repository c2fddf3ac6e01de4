// Dynamic partial-order reduction: of all schedules that differ only in the order of steps that do not
// depend on each other, one is run. Source sets with sleep sets (Abdulla, Aronis, Jonsson, Sagonas, POPL 2014),
// with waits: a wait that only became possible through an earlier store is ordered after it, not in a race with it.
#pragma once

#include <cstdint>
#include <vector>

#include "explorer/machine.hpp"

namespace heddle::explorer {

class ReducedStrategy : public Strategy {
 public:
  void start_run() override { depth_ = 0; }
  int pick(const Machine& machine, std::uint32_t enabled) override;
  int choose(int alternatives) override;
  /// Prepares the next run; false when nothing is left.
  bool advance();

 private:
  /// What is known of one step of the current run, and what remains to be tried in its place.
  struct Frame {
    std::uint32_t enabled = 0;
    std::uint32_t sleeping = 0;   ///< need not be tried: equivalent runs have been made
    std::uint32_t done = 0;       ///< have been tried
    std::uint32_t backtrack = 0;  ///< are to be tried
    int worker = -1;
    int number = 0;  ///< of the worker's own steps, from 1
    int alternative = 0;
    int alternatives = 1;
    bool fresh = true;  ///< not looked at since `worker` was set
    Clock before;       ///< for every worker, how many of its steps come before this one in every equivalent run
  };
  bool comes_before(const Frame& earlier, const Frame& later) const;
  void order(const Machine& machine, int worker);
  void add_backtrack(std::size_t at, const Frame& frame);
  std::uint32_t sleepers_after(const Machine& machine, const Frame& frame) const;

  std::vector<Frame> frames_;
  std::size_t depth_ = 0;
};

}  // namespace heddle::explorer
