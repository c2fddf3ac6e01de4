#include "recovery/driver.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace heddle {

namespace {

using Clock = std::chrono::steady_clock;

/// Roll calls of a step, in a row, that lose and bring back nobody, before a fault is taken for one that another one does not mend.
constexpr std::uint32_t most_idle_roll_calls = 8;

/// A rank that came back in vain waits a deadline before it tries again, then twice as long each time, up to so many.
constexpr int most_deadlines_apart = 8;

double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace

/// Why an attempt ended, and whom to suspect.
struct RecoveryDriver::Trouble {
  std::string reason;
  std::vector<bool> suspects;
};

RecoveryDriver::RecoveryDriver(Group& group, const RecoveryOptions& options, Engine engine)
    : group_(group),
      options_(options),
      engine_(std::move(engine)),
      agreement_(group.store(), group.rank(), group.ranks(), group.ranks() / group.nodes()) {}

Patience RecoveryDriver::patience() const {
  const std::chrono::nanoseconds others = options_.patience ? *options_.patience : 3 * group_.deadline();
  return {options_.grace, others, std::min(group_.deadline(), others)};
}

std::vector<bool> RecoveryDriver::suspects(int member) const {
  std::vector<bool> named(static_cast<std::size_t>(group_.ranks()), false);
  if (member >= 0 && member < group_.ranks() && member != group_.rank()) named[static_cast<std::size_t>(member)] = true;
  return named;
}

void RecoveryDriver::start(Entry entry) {
  if (entry == Entry::late) return rejoin();
  Interruption first;
  engine_.rebuild(members(), first);
  is_built_ = true;
}

/// Who is in again, and out before the end of a step, has a fault that lasts, such as a link that is cut: each time costs the
/// others a meeting that fails.
void RecoveryDriver::wait_after_vain_returns() {
  if (vain_returns_ == 0) return;
  const int deadlines = std::min(most_deadlines_apart, 1 << std::min(vain_returns_ - 1, 16));
  const auto end = Clock::now() + deadlines * group_.deadline();
  for (auto now = Clock::now(); now < end; now = Clock::now()) {
    group_.answer_door();
    std::this_thread::sleep_for(std::min<Clock::duration>(end - now, std::chrono::milliseconds(5)));
  }
}

void RecoveryDriver::rejoin() {
  is_built_ = false;
  idle_roll_calls_ = 0;
  wait_after_vain_returns();
  agreement_.join(patience().others);
  vain_returns_ += 1;
  Interruption interruption;
  interruption.reason = "this rank came back";
  interruption.noticed = Clock::now();
  interruption.step = steps();
  Trouble trouble;
  if (!rebuild(interruption, trouble)) return recover(std::move(trouble));
  interruptions_.push_back(std::move(interruption));
}

/// Once through `body` to the end of the step; what went wrong with a rank, or nothing.
std::optional<RecoveryDriver::Trouble> RecoveryDriver::attempt(const std::function<void()>& body) {
  if (!is_built_) return Trouble{"what the mask needs had not been made", suspects(-1)};
  if (agreement_.should_meet()) return Trouble{"another rank called", suspects(-1)};
  try {
    body();
  } catch (const FaultError& error) {
    const int peer = error.fault().peer;
    return Trouble{error.what(), suspects(peer < 0 ? peer : engine_.member_of(peer))};
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::fault) return Trouble{error.what(), suspects(-1)};
    agreement_.call();  // the others shall not wait for this rank
    engine_.interrupt();
    throw;
  } catch (...) {
    agreement_.call();
    engine_.interrupt();
    throw;
  }
  switch (agreement_.finish(group_.deadline())) {
    case Agreement::Finish::all:
      return std::nullopt;
    case Agreement::Finish::called:
      return Trouble{"another rank called", suspects(-1)};
    case Agreement::Finish::late:
      break;
  }
  return Trouble{"a rank did not come to the end of the step", agreement_.unfinished()};
}

void RecoveryDriver::step(const std::function<void()>& body) {
  const std::uint32_t before = steps();
  idle_roll_calls_ = 0;
  for (;;) {
    group_.answer_door();
    const std::size_t recovered = interruptions_.size();
    const auto begin = Clock::now();
    std::optional<Trouble> trouble = attempt(body);
    if (recovered > 0 && interruptions_.back().run_again && interruptions_.back().again == 0)
      interruptions_.back().again = seconds(begin, Clock::now());
    if (!trouble) {
      vain_returns_ = 0;
      return;
    }
    recover(std::move(*trouble));
    Interruption& last = interruptions_.back();
    last.lost = seconds(begin, last.noticed);
    last.step = before;
    if (steps() != before) {  // it was done on all ranks
      vain_returns_ = 0;
      return;
    }
    last.run_again = true;
  }
}

/// Until a mask holds and everything is made for it.
void RecoveryDriver::recover(Trouble trouble) {
  Interruption interruption;
  interruption.reason = trouble.reason;
  interruption.noticed = Clock::now();
  interruption.roll_calls = 0;
  do {
    is_built_ = false;
    const auto begin = Clock::now();
    const Members before = members();
    agreement_.call();
    engine_.interrupt();
    if (idle_roll_calls_ >= most_idle_roll_calls) {
      throw Error(ErrorKind::fault, fmt::format("recovery: {} roll calls in a row lost no rank, and each time the step or what the "
                                                "mask needs failed again; the last time: {}",
                                                most_idle_roll_calls, trouble.reason));
    }
    agreement_.settle(trouble.suspects, patience());
    // By generation: a rank may have gone through two at once, and all shall give up at the same one.
    idle_roll_calls_ = members().live == before.live ? idle_roll_calls_ + (members().generation - before.generation) : 0;
    interruption.agree += seconds(begin, Clock::now());
    interruption.roll_calls += 1;
  } while (!rebuild(interruption, trouble));
  interruptions_.push_back(std::move(interruption));
}

/// False, and why, where a member was lost meanwhile.
bool RecoveryDriver::rebuild(Interruption& interruption, Trouble& trouble) {
  try {
    engine_.rebuild(members(), interruption);
  } catch (const FaultError& error) {
    trouble = {error.what(), suspects(error.fault().peer)};
    return false;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::fault) throw;
    trouble = {error.what(), suspects(-1)};
    return false;
  }
  interruption.members = members();
  is_built_ = true;
  return true;
}

}  // namespace heddle
