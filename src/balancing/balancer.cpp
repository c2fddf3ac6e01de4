#include "balancing/balancer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "balancing/look.hpp"
#include "balancing/part_way.hpp"
#include "heddle/error.hpp"

namespace heddle {

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

Balancer::Balancer(Group& members, BalancingEngine& engine, const ReplicaMap& first, const BalancingOptions& options)
    : members_(members), engine_(engine), options_(options), map_(first), board_(members, first.experts()) {}

/// What any member wrote before call number `seen` began can be read behind its end.
void Balancer::after_call() {
  ++report_.calls;
  if (begins_look()) {
    engine_.put_counts_aside();
    look_ = PendingLook{report_.calls, {}};
  }
  const std::int64_t seen = engine_.ended(report_.calls);
  if (change_ && board_.all_ready(report_.switches, change_->began, seen)) switch_over();
  if (look_) go_on_looking(seen);
  if (change_) copy_some(seen);
}

bool Balancer::begins_look() const {
  return options_.every && report_.calls % *options_.every == 0 && !change_ && !look_ && engine_.has_all_ranks();
}

void Balancer::go_on_looking(std::int64_t seen) {
  if (look_->told) {
    if (seen >= *look_->told) look();
  } else if (seen >= look_->at) {
    board_.tell_counts(report_.looks, engine_.counts_aside());
    look_->told = report_.calls + 1;
  }
}

void Balancer::look() {
  const Look found = look_at(map_, options_, board_.all_counts(report_.looks));
  look_.reset();
  ++report_.looks;
  report_.imbalance = found.imbalance;
  report_.expected = found.expected;
  if (!change_ && found.expected < found.imbalance * (1 - options_.worth)) begin(found.wanted);
}

void Balancer::move_to(const ReplicaMap& map) {
  if (change_) throw InputError("a change of placement is under way; the next one begins when it is done (is_moving)");
  if (!map.is_even() || map.physical() != map_.physical() || map.ranks() != map_.ranks() || map.experts() != map_.experts()) {
    throw InputError(fmt::format("a placement of {} copies of {} experts on {} ranks for a layer of {} of {} on {}", map.physical(),
                                 map.experts(), map.ranks(), map_.physical(), map_.experts(), map_.ranks()));
  }
  if (begin(map)) return;
  throw InputError(fmt::format("no step of {} experts a rank leads to that placement without an expert that is nowhere meanwhile",
                               engine_.most_arrivals()));
}

/// False where there is no way; members come to the same answer.
bool Balancer::begin(const ReplicaMap& goal) {
  const ReplicaMap to = part_way(map_, goal, engine_.most_arrivals());
  if (to == map_ && !(goal == map_)) return false;
  engine_.plan(map_, to);
  change_ = Change{goal, to, report_.calls, false};
  say_if_ready();
  return true;
}

/// Nothing is copied before the end of a call that began, everywhere, behind the last switch.
void Balancer::copy_some(std::int64_t seen) {
  if (seen > settled_) {
    const auto since = std::chrono::steady_clock::now();
    report_.copied_bytes += engine_.copy_some(options_.copy_bytes);
    report_.copy_seconds += seconds_since(since);
  }
  say_if_ready();
}

void Balancer::say_if_ready() {
  if (change_->said_ready || !engine_.has_copied_all()) return;
  board_.say_ready(report_.switches, report_.calls + 1);
  change_->said_ready = true;
}

void Balancer::switch_over() {
  const ReplicaMap goal = put_in_force();
  if (!(map_ == goal)) begin(goal);
}

/// The change under way ends; where it led.
ReplicaMap Balancer::put_in_force() {
  const auto since = std::chrono::steady_clock::now();
  report_.moved += engine_.put_in_place(change_->to);
  map_ = std::move(change_->to);
  ReplicaMap goal = std::move(change_->goal);
  change_.reset();
  settled_ = report_.calls;
  ++report_.switches;
  report_.switch_seconds += seconds_since(since);
  return goal;
}

void Balancer::reset() {
  std::int64_t switches = 0, looks = 0, calls = 0;
  const std::string mine = fmt::format("{} {} {}", report_.switches, report_.looks, report_.calls);
  for (const std::string& text : members_.exchange(mine, "placements after a fault")) {
    std::istringstream numbers(text);  // empty for a dead member
    for (std::int64_t* most : {&switches, &looks, &calls}) {
      std::int64_t number = 0;
      if (numbers >> number) *most = std::max(*most, number);
    }
  }
  // Nobody has switched unless all had said that they have everything. What would follow is forgotten: it may not even be possible
  // with the ranks that are left.
  if (report_.switches < switches) put_in_force();
  engine_.forget();
  change_.reset();
  look_.reset();
  report_.looks = looks;
  report_.calls = calls + 1;  // beyond what anybody has said
  settled_ = report_.calls;
  members_.barrier("placements after a fault");  // no cell is read before it is in place
}

}  // namespace heddle
