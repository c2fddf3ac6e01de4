#include "explorer/machine.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <stdexcept>

namespace heddle::explorer {

namespace {
std::size_t index_of(int worker) { return static_cast<std::size_t>(worker); }

/// Addresses kept free on both sides of the heap, so that an offset or a rank computed from garbage stays in sight.
constexpr std::size_t around = std::size_t{1} << 45;
}  // namespace

std::string Scenario::describe(std::size_t offset_in_part) const { return fmt::format("byte {}", offset_in_part); }

Machine::Machine(Scenario& scenario, const Options& options)
    : scenario_(scenario),
      options_(options),
      stride_(align_up(scenario.part_bytes(), 128)),
      base_(nullptr),
      memory_(scenario.ranks(), stride_, scenario.poisoned()),
      workers_(index_of(scenario.ranks() * scenario.workers_a_rank())),
      teams_(index_of(3 * scenario.ranks())) {
  if (workers() > max_workers) throw std::invalid_argument("the explorer holds at most 16 workers");
  // Addresses only: what the heap holds lies in memory_, and whoever touches it without a verb faults.
  void* reserved = mmap(nullptr, 2 * around + stride_ * index_of(scenario.ranks()), PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw std::runtime_error("the explorer cannot reserve addresses for a heap");
  base_ = static_cast<std::byte*>(reserved) + around;
}

Machine::~Machine() { munmap(base_ - around, 2 * around + stride_ * index_of(scenario_.ranks())); }

HeapView Machine::view(int rank) const { return {base_, stride_, rank, scenario_.ranks()}; }

bool Machine::misses_heap(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  const std::byte* end = base_ + stride_ * index_of(scenario_.ranks());
  return (byte >= base_ - around && byte < base_) || (byte >= end && byte < end + around);
}

Range Machine::range(const void* address, std::size_t bytes) const {
  const auto begin = static_cast<std::size_t>(static_cast<const std::byte*>(address) - base_);
  return {begin, begin + bytes};
}

void Machine::start_workers() {
  memory_.clear();
  start_teams();
  step_count_ = 0;
  cancelled_ = false;
  violation_.reset();
  scenario_.begin();
  for (int worker = 0; worker < workers(); ++worker) {
    const int rank = worker / scenario_.workers_a_rank();
    WorkerState& state = workers_[index_of(worker)];
    state.steps = 0;
    state.last_step = -1;
    state.coroutine.start([this, rank, worker] {
      try {
        if (scenario_.live(rank)) scenario_.work(*this, rank, worker % scenario_.workers_a_rank());
      } catch (const Cancelled&) {
      } catch (const std::exception& error) {
        if (!violation_) violation_ = fmt::format("{}: {}", worker_name(worker), error.what());
      }
    });
    state.coroutine.resume();
  }
}

Outcome Machine::run(Strategy& strategy) {
  strategy_ = &strategy;
  strategy.start_run();
  start_workers();
  Outcome outcome;
  while (!violation_) {
    const std::uint32_t ready = enabled_workers();
    if (ready == 0) {
      bool all_ended = true;
      for (const WorkerState& state : workers_) all_ended = all_ended && state.coroutine.finished();
      if (!all_ended) violation_ = deadlock();
      outcome.finished = all_ended;
      break;
    }
    if (step_count_ == options_.most_steps) {
      violation_ = fmt::format("no end after {} steps", step_count_);
      break;
    }
    const int worker = strategy.pick(*this, ready);
    if (worker < 0) break;
    execute(worker);
  }
  if (violation_) outcome.violation = report();
  cancel();
  if (outcome.finished && !outcome.violation) scenario_.end();
  return outcome;
}

void Machine::execute(int worker) {
  WorkerState& state = workers_[index_of(worker)];
  if (index_of(step_count_) == steps_.size()) steps_.emplace_back();
  Step& step = steps_[index_of(step_count_)];
  step.worker = worker;
  step.number = ++state.steps;
  step.alternative = 0;
  step.verb = state.verb;
  state.last_step = step_count_++;
  state.coroutine.resume();
}

void Machine::cancel() {
  cancelled_ = true;
  for (WorkerState& state : workers_) {
    if (!state.coroutine.finished()) state.coroutine.resume();
  }
}

Verb& Machine::prepare(int worker, VerbKind kind) {
  Verb& verb = workers_[index_of(worker)].verb;
  verb.reset(kind);
  return verb;
}

void Machine::step(int worker) {
  if (!cancelled_) workers_[index_of(worker)].coroutine.suspend();
  if (cancelled_) throw Cancelled{};
}

int Machine::choose(int alternatives) {
  Step& step = steps_[index_of(step_count_ - 1)];
  step.alternative = strategy_->choose(alternatives);
  return step.alternative;
}

void Machine::violate(const std::string& what) {
  if (!violation_) violation_ = what;
  throw Cancelled{};
}

bool Machine::enabled(int worker) const {
  const WorkerState& state = workers_[index_of(worker)];
  if (state.coroutine.finished()) return false;
  const Verb& verb = state.verb;
  switch (verb.kind) {
    case VerbKind::wait:
      return verb.satisfied_by(memory_.word(verb.word, memory_.newest_version(verb.word)).value);
    case VerbKind::rest:
      return memory_.rings(worker / scenario_.workers_a_rank()) != verb.rung;
    case VerbKind::barrier:
      return barrier_of(worker).generation >= verb.generation;
    default:
      return true;
  }
}

std::uint32_t Machine::enabled_workers() const {
  std::uint32_t bits = 0;
  for (int worker = 0; worker < workers(); ++worker) bits |= enabled(worker) ? 1u << worker : 0u;
  return bits;
}

bool Machine::reversible(const Verb& store, const Verb& verb) const {
  if (verb.kind == VerbKind::wait) return verb.satisfied_by(memory_.word(verb.word, store.version - 1).value);
  if (verb.kind == VerbKind::rest) return store.rung - 1 != verb.rung;
  return true;
}

void Machine::start_teams() {
  for (std::size_t i = 0; i < teams_.size(); ++i) {
    const int sizes[] = {rank_size(), scenario_.dispatchers(), rank_size() - scenario_.dispatchers()};
    teams_[i] = {};
    teams_[i].size = sizes[i % 3];
  }
}

void Machine::arrive(int worker, Meeting meeting) {
  const std::size_t index = team_of(worker, meeting);
  Team& t = team(index);
  workers_[index_of(worker)].verb.team = index;
  t.gathering.join(memory_.clock(worker));
  t.steps_gathering.push_back(workers_[index_of(worker)].last_step);
  memory_.advance(worker);
  workers_[index_of(worker)].verb.generation = t.generation + 1;
  if (++t.arrived < t.size) return;
  ++t.generation;
  t.passed[t.generation % 2] = t.gathering;
  t.steps_passed[t.generation % 2] = t.steps_gathering;
  t.arrived = 0;
  t.gathering = {};
  t.steps_gathering.clear();
}

const std::vector<int>& Machine::before_barrier(int worker) const {
  return barrier_of(worker).steps_passed[workers_[index_of(worker)].verb.generation % 2];
}

bool Machine::arrive_last(int worker) {
  Team& t = team(team_of(worker, Meeting::team));
  t.known_to_last.join(memory_.clock(worker));
  memory_.advance(worker);
  if (++t.done < t.size) return false;
  memory_.clock(worker).join(t.known_to_last);
  t.done = 0;
  t.known_to_last = {};
  return true;
}

void Machine::pass(int worker) {
  memory_.clock(worker).join(barrier_of(worker).passed[workers_[index_of(worker)].verb.generation % 2]);
}

}  // namespace heddle::explorer
