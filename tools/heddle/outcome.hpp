// How the ranks of a job ended, and which of them says why it failed.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <type_traits>

#include "heddle/error.hpp"
#include "heddle/layer.hpp"

namespace heddle::tool {

/// What a rank leaves for the command, in memory that processes share.
struct RankOutcome {
  enum class State : int { silent, done, bad_input, fault };
  State state = State::silent;
  bool own_fault = false;  ///< this rank itself gave up, it does not only repeat another's
  double seconds = 0;
  std::size_t heap_bytes = 0;
  std::uint64_t kernels = 0;  ///< launched by this rank's process, noted by its first rank
  LayerReport report;
  char message[1000] = {};
  char choice[3000] = {};  ///< way auto: what rank 0's layer says of its choice
};
static_assert(std::is_trivially_copyable_v<RankOutcome>);

/// Runs a rank's part and notes how it ended.
inline void attempt(RankOutcome& outcome, int rank, const std::function<void()>& part) {
  const auto leave = [&outcome](RankOutcome::State state, const char* message) {
    std::snprintf(outcome.message, sizeof outcome.message, "%s", message);
    outcome.state = state;
  };
  try {
    part();
    outcome.state = RankOutcome::State::done;
  } catch (const FaultError& error) {
    outcome.own_fault = error.fault().rank == rank;
    leave(RankOutcome::State::fault, error.what());
  } catch (const InputError& error) {
    leave(RankOutcome::State::bad_input, error.what());
  } catch (const std::exception& error) {
    leave(RankOutcome::State::fault, error.what());
  }
}

/// The outcome that explains a failure: bad input first, then a rank's own fault, then any; null where all are done.
inline const RankOutcome* cause_of(std::span<const RankOutcome> outcomes) {
  const auto weight = [](const RankOutcome& outcome) {
    switch (outcome.state) {
      case RankOutcome::State::done:
        return 0;
      case RankOutcome::State::silent:
        return 1;
      case RankOutcome::State::fault:
        return outcome.own_fault ? 3 : 2;
      case RankOutcome::State::bad_input:
        return 4;
    }
    return 0;
  };
  const RankOutcome* chosen = nullptr;
  for (const RankOutcome& outcome : outcomes) {
    if (weight(outcome) > (chosen == nullptr ? 0 : weight(*chosen))) chosen = &outcome;
  }
  return chosen;
}

/// Throws the error of the outcome that explains a failure, if there was one. `front`: said before it. `killed`: what is known of
/// processes that were killed; said behind it, of all but bad input.
inline void throw_failure(std::span<const RankOutcome> outcomes, const std::string& front = "", const std::string& killed = "") {
  const RankOutcome* cause = cause_of(outcomes);
  if (cause == nullptr) return;
  switch (cause->state) {
    case RankOutcome::State::bad_input:
      throw InputError(front + cause->message);
    case RankOutcome::State::silent:
      throw Error(ErrorKind::fault,
                  fmt::format("{}the process of rank {} ended without a word{}", front, cause - outcomes.data(), killed));
    default:
      throw Error(ErrorKind::fault, front + cause->message + killed);
  }
}

}  // namespace heddle::tool
