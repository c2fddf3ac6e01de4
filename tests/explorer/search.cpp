#include "explorer/search.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <random>
#include <stdexcept>
#include <vector>

#include "explorer/reduction.hpp"

namespace heddle::explorer {

namespace {

bool has(std::uint32_t bits, int worker) { return (bits >> worker & 1u) != 0; }
int lowest(std::uint32_t bits) { return std::countr_zero(bits); }
int running(const Machine& machine) {
  return machine.step_count() == 0 ? -1 : machine.steps()[static_cast<std::size_t>(machine.step_count() - 1)].worker;
}
bool touches_word(const Verb& verb) {
  return std::any_of(verb.accesses.begin(), verb.accesses.end(),
                     [](const Access& access) { return access.to != Access::To::plain; });
}

/// Depth first over all choices, by repeating the choices of the last run up to the last that has an alternative left.
class BoundedStrategy : public Strategy {
 public:
  BoundedStrategy(int preemptions, bool only_words) : bound_(preemptions), only_words_(only_words) {}
  bool advance() {
    while (!choices_.empty() && choices_.back().taken + 1 == choices_.back().of) choices_.pop_back();
    if (choices_.empty()) return false;
    ++choices_.back().taken;
    return true;
  }
  void start_run() override {
    next_ = 0;
    preemptions_ = 0;
  }
  int pick(const Machine& machine, std::uint32_t enabled) override {
    const int current = running(machine);
    const bool goes_on = current >= 0 && has(enabled, current);
    if (goes_on && bound_ >= 0 && preemptions_ == bound_) return current;
    if (goes_on && only_words_ && !touches_word(machine.pending(current))) return current;
    int order = take(std::popcount(enabled));
    if (goes_on) {
      if (order == 0) return current;
      ++preemptions_;
      --order;
      enabled &= ~(1u << current);
    }
    for (; order > 0; --order) enabled &= enabled - 1;
    return lowest(enabled);
  }
  int choose(int alternatives) override { return take(alternatives); }

 private:
  struct Choice {
    int taken = 0;
    int of = 1;
  };
  int take(int of) {
    if (of == 1) return 0;
    if (next_ == choices_.size()) choices_.push_back({0, of});
    return choices_[next_++].taken;
  }
  int bound_;
  bool only_words_;
  int preemptions_ = 0;
  std::size_t next_ = 0;
  std::vector<Choice> choices_;
};

class RandomStrategy : public Strategy {
 public:
  explicit RandomStrategy(std::uint64_t seed) : random_(seed) {}
  /// Priorities change at `changes` of the first `length` steps; without changes every pick is uniform.
  void prepare(int workers, int changes, int length) {
    priorities_.clear();
    change_at_.clear();
    if (changes == 0) return;
    for (int worker = 0; worker < workers; ++worker) priorities_.push_back(worker + changes + 1);
    std::shuffle(priorities_.begin(), priorities_.end(), random_);
    for (int i = 0; i < changes; ++i) change_at_.push_back(below(std::max(length, 1)));
  }
  int pick(const Machine& machine, std::uint32_t enabled) override {
    if (priorities_.empty()) {
      for (int skip = below(std::popcount(enabled)); skip > 0; --skip) enabled &= enabled - 1;
      return lowest(enabled);
    }
    const int current = running(machine);
    for (std::size_t i = 0; i < change_at_.size(); ++i) {
      if (change_at_[i] == machine.step_count() && current >= 0)
        priorities_[static_cast<std::size_t>(current)] = static_cast<int>(i);
    }
    int best = lowest(enabled);
    for (int worker = best + 1; worker < machine.workers(); ++worker) {
      if (has(enabled, worker) && priorities_[static_cast<std::size_t>(worker)] > priorities_[static_cast<std::size_t>(best)])
        best = worker;
    }
    return best;
  }
  int choose(int alternatives) override { return below(alternatives); }
  int below(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }

 private:
  std::mt19937_64 random_;
  std::vector<int> priorities_;
  std::vector<int> change_at_;
};

class ReplayStrategy : public Strategy {
 public:
  explicit ReplayStrategy(const std::string& schedule) {
    for (std::size_t at = 0; at < schedule.size();) {
      std::size_t used = 0;
      Choice choice{std::stoi(schedule.substr(at), &used), false};
      at += used;
      if (at < schedule.size() && schedule[at] == 's') {
        choice.stale = true;
        ++at;
      }
      int times = 1;
      if (at < schedule.size() && schedule[at] == 'x') {
        times = std::stoi(schedule.substr(at + 1), &used);
        at += 1 + used;
      }
      if (at < schedule.size() && schedule[at++] != ',') throw std::invalid_argument("not a schedule: " + schedule);
      choices_.insert(choices_.end(), static_cast<std::size_t>(times), choice);
    }
  }
  void start_run() override { next_ = 0; }
  int pick(const Machine& machine, std::uint32_t enabled) override {
    const int current = running(machine);
    if (next_ >= choices_.size()) {
      ++next_;
      return current >= 0 && has(enabled, current) ? current : lowest(enabled);
    }
    const int worker = choices_[next_++].worker;
    if (worker < 0 || worker >= machine.workers() || !has(enabled, worker)) {
      throw std::invalid_argument(
          fmt::format("this schedule does not fit the scenario: worker {} cannot go on at step {}", worker, next_ - 1));
    }
    return worker;
  }
  int choose(int) override { return next_ <= choices_.size() && choices_[next_ - 1].stale ? 1 : 0; }

 private:
  struct Choice {
    int worker = 0;
    bool stale = false;
  };
  std::vector<Choice> choices_;
  std::size_t next_ = 0;
};

/// One run, counted; true while the search should go on.
bool run_once(Machine& machine, Strategy& strategy, Report& report) {
  Outcome outcome = machine.run(strategy);
  report.steps += static_cast<std::uint64_t>(machine.step_count());
  report.longest = std::max(report.longest, machine.step_count());
  ++(outcome.finished || outcome.violation ? report.schedules : report.given_up);
  report.violation = std::move(outcome.violation);
  return !report.violation;
}

/// Run after run until nothing is left, a violation is found, or `most` have been made.
template <class Searching>
Report search(Scenario& scenario, Searching& strategy, const std::string& how, std::uint64_t most, const Options& options) {
  Machine machine(scenario, options);
  Report report{.how = how};
  while (run_once(machine, strategy, report)) {
    report.complete = !strategy.advance();
    if (report.complete || report.schedules + report.given_up >= most) break;
  }
  return report;
}

}  // namespace

std::string Report::line() const {
  std::string text = fmt::format("{}: {} schedules", how, schedules);
  if (given_up > 0) text += fmt::format(" ({} more given up as equivalent)", given_up);
  text += fmt::format(", {} steps, longest {}", steps, longest);
  if (violation) return text + "; VIOLATION: " + violation->what;
  return text + (complete ? "; complete" : "; not complete");
}

Report explore_all(Scenario& scenario, std::uint64_t most, const Options& options) {
  ReducedStrategy strategy;
  return search(scenario, strategy, "all schedules up to equivalence", most, options);
}

Report explore_bounded(Scenario& scenario, int preemptions, std::uint64_t most, const Options& options) {
  BoundedStrategy strategy(preemptions, false);
  const std::string how = preemptions < 0 ? "all schedules" : fmt::format("all schedules with at most {} preemptions", preemptions);
  return search(scenario, strategy, how, most, options);
}

Report explore_word_orders(Scenario& scenario, std::uint64_t most, const Options& options) {
  BoundedStrategy strategy(-1, true);
  return search(scenario, strategy, "all orders of verbs on words", most, options);
}

Report explore_random(Scenario& scenario, std::uint64_t seed, std::uint64_t schedules, const Options& options) {
  Machine machine(scenario, options);
  RandomStrategy strategy(seed);
  Report report{.how = fmt::format("random schedules from seed {}", seed)};
  for (std::uint64_t i = 0; i < schedules; ++i) {
    const int changes = i % 2 == 0 ? 0 : 1 + strategy.below(4);
    strategy.prepare(machine.workers(), changes, report.longest);
    if (!run_once(machine, strategy, report)) break;
  }
  return report;
}

Report replay(Scenario& scenario, const std::string& schedule, const Options& options) {
  Machine machine(scenario, options);
  ReplayStrategy strategy(schedule);
  Report report{.how = "replay"};
  run_once(machine, strategy, report);
  return report;
}

}  // namespace heddle::explorer
