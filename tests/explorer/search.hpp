// Ways through the schedules of a scenario. All are deterministic: the same call makes the same runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "explorer/machine.hpp"

namespace heddle::explorer {

struct Report {
  std::string how;                                    ///< the search, with its bound or seed
  std::uint64_t schedules = 0;                        ///< runs that came to an end
  std::uint64_t given_up = 0;                         ///< runs ended early because an equivalent one had been made
  std::uint64_t steps = 0;                            ///< over all runs
  int longest = 0;                                    ///< most steps of a run
  bool complete = false;                              ///< nothing within the search's bound is left
  std::optional<Violation> violation = std::nullopt;  ///< the first found; the search ends with it

  /// One line for a test's log.
  std::string line() const;
};

/// Every schedule up to the order of steps that do not depend on each other (dynamic partial-order
/// reduction with source sets and sleep sets), or the first `most` of them.
Report explore_all(Scenario& scenario, std::uint64_t most, const Options& options = {});

/// Every schedule with at most `preemptions` switches away from a worker that could have gone on,
/// without any reduction. A negative bound: every schedule there is.
Report explore_bounded(Scenario& scenario, int preemptions, std::uint64_t most, const Options& options = {});

/// Every order of the verbs on words, without any reduction: a worker is left only before such a verb.
Report explore_word_orders(Scenario& scenario, std::uint64_t most, const Options& options = {});

/// Schedules drawn from a seed: one half picks uniformly at every step, the other gives the workers
/// random priorities that change at a few random steps (which finds bugs that need few switches).
Report explore_random(Scenario& scenario, std::uint64_t seed, std::uint64_t schedules, const Options& options = {});

/// The run of one schedule as a Violation gives it; past its end, the running worker goes on.
Report replay(Scenario& scenario, const std::string& schedule, const Options& options = {});

}  // namespace heddle::explorer
