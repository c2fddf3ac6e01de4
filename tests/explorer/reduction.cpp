#include "explorer/reduction.hpp"

#include <bit>
#include <stdexcept>

namespace heddle::explorer {

namespace {
std::uint32_t bit(int worker) { return 1u << worker; }
std::size_t index_of(int worker) { return static_cast<std::size_t>(worker); }
}  // namespace

bool ReducedStrategy::comes_before(const Frame& earlier, const Frame& later) const {
  return later.before.at[index_of(earlier.worker)] >= static_cast<std::uint32_t>(earlier.number);
}

int ReducedStrategy::pick(const Machine& machine, std::uint32_t enabled) {
  if (depth_ == frames_.size()) {
    Frame frame;
    frame.enabled = enabled;
    frame.sleeping = frames_.empty() ? 0 : sleepers_after(machine, frames_.back());
    const std::uint32_t awake = enabled & ~frame.sleeping;
    if (awake == 0) return -1;
    const int last = frames_.empty() ? -1 : frames_.back().worker;
    frame.worker = last >= 0 && (awake & bit(last)) != 0 ? last : std::countr_zero(awake);
    frame.backtrack = bit(frame.worker);
    frames_.push_back(frame);
  }
  const int worker = frames_[depth_].worker;
  if (frames_[depth_].fresh) order(machine, worker);
  ++depth_;
  return worker;
}

int ReducedStrategy::choose(int alternatives) {
  Frame& frame = frames_[depth_ - 1];
  frame.alternatives = alternatives;
  return frame.alternative;
}

std::uint32_t ReducedStrategy::sleepers_after(const Machine& machine, const Frame& frame) const {
  // The step of `frame` has just happened: the others' pending verbs are still those they had before it.
  const Verb& happened = machine.steps()[frames_.size() - 1].verb;
  std::uint32_t sleeping = 0;
  for (std::uint32_t left = (frame.sleeping | frame.done) & ~bit(frame.worker); left != 0; left &= left - 1) {
    const int other = std::countr_zero(left);
    if (!dependent(happened, machine.pending(other))) sleeping |= bit(other);
  }
  return sleeping;
}

/// Finds what comes before the step that `worker` is about to make, and with which earlier steps it is
/// in a race: dependent on them with nothing in between, and possible without them.
void ReducedStrategy::order(const Machine& machine, int worker) {
  Frame& frame = frames_[depth_];
  frame.fresh = false;
  frame.before = {};
  frame.number = 1;
  const Verb& verb = machine.pending(worker);
  for (std::size_t i = depth_; i-- > 0;) {
    if (frames_[i].worker != worker) continue;
    frame.before = frames_[i].before;
    frame.number = frames_[i].number + 1;
    break;
  }
  if (verb.kind == VerbKind::barrier) {
    for (const int step : machine.before_barrier(worker)) {
      if (step >= 0) frame.before.join(frames_[index_of(step)].before);
    }
  }
  std::vector<std::size_t> races;
  for (std::size_t i = depth_; i-- > 0;) {
    const Frame& earlier = frames_[i];
    const Verb& made = machine.steps()[i].verb;
    if (earlier.worker == worker || comes_before(earlier, frame) || !dependent(made, verb)) continue;
    if (machine.reversible(made, verb)) races.push_back(i);
    frame.before.join(earlier.before);
  }
  frame.before.at[index_of(worker)] = static_cast<std::uint32_t>(frame.number);
  for (const std::size_t i : races) add_backtrack(i, frame);
}

/// Makes sure that some worker is tried at `at` that leads to a run where `frame` comes before that step.
void ReducedStrategy::add_backtrack(std::size_t at, const Frame& frame) {
  // The steps since then that do not come after it, and who can begin them.
  std::vector<const Frame*> independent;
  std::uint32_t seen = 0;
  std::uint32_t initial = 0;
  const auto consider = [&](const Frame& step) {
    if ((seen & bit(step.worker)) == 0) {
      bool first = true;
      for (const Frame* earlier : independent) first = first && !comes_before(*earlier, step);
      if (first) initial |= bit(step.worker);
      seen |= bit(step.worker);
    }
    independent.push_back(&step);
  };
  for (std::size_t i = at + 1; i < depth_; ++i) {
    if (!comes_before(frames_[at], frames_[i])) consider(frames_[i]);
  }
  consider(frame);
  Frame& target = frames_[at];
  if ((initial & target.backtrack) != 0) return;
  const std::uint32_t possible = initial & target.enabled;
  if (possible == 0) throw std::logic_error("partial-order reduction: nobody can begin the other order");
  target.backtrack |= (possible & bit(frame.worker)) != 0 ? bit(frame.worker) : bit(std::countr_zero(possible));
}

bool ReducedStrategy::advance() {
  while (!frames_.empty()) {
    Frame& frame = frames_.back();
    if (frame.alternative + 1 < frame.alternatives) {
      ++frame.alternative;
      return true;
    }
    frame.done |= bit(frame.worker);
    const std::uint32_t left = frame.backtrack & ~frame.done & ~frame.sleeping;
    if (left != 0) {
      frame.worker = std::countr_zero(left);
      frame.alternative = 0;
      frame.alternatives = 1;
      frame.fresh = true;
      return true;
    }
    frames_.pop_back();
  }
  return false;
}

}  // namespace heddle::explorer
