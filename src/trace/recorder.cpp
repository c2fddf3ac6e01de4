#include "trace/recorder.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace heddle::trace {

namespace {

struct Here {
  Context context;
  Lane* lane = nullptr;
};
Here& here() {
  thread_local Here of_this_thread;
  return of_this_thread;
}

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Lane& Recorder::open(const LaneName& name) {
  constexpr std::size_t usual_spans = 1024;
  const std::lock_guard lock(opening_);
  Lane& lane = lanes_.emplace_back();
  lane.name = name;
  lane.spans.reserve(usual_spans);
  return lane;
}

void Recorder::add(Lane lane) {
  const std::lock_guard lock(opening_);
  lanes_.push_back(std::move(lane));
}

void Recorder::note_clock(int device, std::int64_t uncertainty) {
  const std::lock_guard lock(opening_);
  std::int64_t& noted = clocks_[device];
  noted = std::max(noted, uncertainty);
}

Trace Recorder::take() {
  Trace trace(std::make_move_iterator(lanes_.begin()), std::make_move_iterator(lanes_.end()));
  lanes_.clear();
  std::stable_sort(trace.begin(), trace.end(), [](const Lane& a, const Lane& b) { return a.name < b.name; });
  if (trace.empty()) return trace;
  const auto earlier = [](const Lane& a, const Lane& b) { return a.begin < b.begin; };
  const std::int64_t first = std::min_element(trace.begin(), trace.end(), earlier)->begin;
  for (Lane& lane : trace) {
    lane.begin -= first;
    lane.end -= first;
    for (Span& span : lane.spans) {
      span.begin -= first;
      span.end -= first;
    }
  }
  return trace;
}

Context context() { return here().context; }

Attached::Attached(Recorder& recorder, const LaneName& name) : outer_(here().context), outer_lane_(here().lane) {
  attach(recorder, name);
}
Attached::Attached(const Context& parent, Role role, int number) : outer_(here().context), outer_lane_(here().lane) {
  if (parent.recorder != nullptr) attach(*parent.recorder, {parent.rank, role, number});
}
void Attached::attach(Recorder& recorder, const LaneName& name) {
  Here& mine = here();
  mine.lane = &recorder.open(name);
  mine.context = {&recorder, name.rank};
  mine.lane->begin = now();
}
Attached::~Attached() {
  Here& mine = here();
  if (mine.lane != nullptr && mine.lane != outer_lane_) mine.lane->end = now();
  mine = {outer_, outer_lane_};
}

Recorded::Recorded(Kind kind, const TaskNote& task) : lane_(here().lane) {
  if (lane_ == nullptr) return;
  span_.kind = kind;
  span_.task = task;
  span_.begin = now();
}
Recorded::Recorded(const WordName& word) : Recorded(Kind::wait) { span_.word = word; }
Recorded::~Recorded() {
  if (lane_ == nullptr) return;
  span_.end = now();
  lane_->spans.push_back(span_);
}

}  // namespace heddle::trace
