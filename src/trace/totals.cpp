#include "trace/totals.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>

#include "trace/words.hpp"

namespace heddle::trace {

namespace {

/// Outer spans before inner ones. Of two that are alike the one that ended last, which is the outer one.
std::vector<int> in_order_of_begin(const Lane& lane) {
  std::vector<int> order(lane.spans.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const Span& one = lane.spans[static_cast<std::size_t>(a)];
    const Span& other = lane.spans[static_cast<std::size_t>(b)];
    return std::tuple(one.begin, -one.end, -a) < std::tuple(other.begin, -other.end, -b);
  });
  return order;
}

/// Lines of one role, found by what they are.
class Lines {
 public:
  void add(const std::string& what, const std::string& during, bool is_wait, std::int64_t nanoseconds) {
    Line& line = lines_[{is_wait, what, during}];
    line.what = what;
    line.during = during;
    line.is_wait = is_wait;
    ++line.count;
    line.nanoseconds += nanoseconds;
  }
  std::vector<Line> take() const {
    std::vector<Line> all;
    for (const auto& [key, line] : lines_) all.push_back(line);
    std::stable_sort(all.begin(), all.end(), [](const Line& a, const Line& b) { return a.nanoseconds > b.nanoseconds; });
    return all;
  }

 private:
  std::map<std::tuple<bool, std::string, std::string>, Line> lines_;
};

bool is_wait(Kind kind) { return kind == Kind::wait || kind == Kind::next_task; }

/// What a span held up, or whose it is, where its own name does not say so.
std::string during(const Span& span, const Span* parent) {
  const bool is_told = parent != nullptr && parent->kind != Kind::move;
  if (span.kind == Kind::wait) return is_told ? text_of(*parent) : word_text(span.word.kind).phase;
  return is_told && parent->kind == Kind::shared ? text_of(*parent) : "";
}

void add_lane(const Lane& lane, RoleTotals& totals, Lines& lines) {
  const std::vector<std::int64_t> own = own_times(lane);
  const std::vector<int> parents = parents_of(lane);
  totals.begin = totals.nanoseconds == 0 ? lane.begin : std::min(totals.begin, lane.begin);
  totals.end = std::max(totals.end, lane.end);
  totals.nanoseconds += lane.end - lane.begin;
  totals.idle += lane.end - lane.begin;
  for (std::size_t i = 0; i < lane.spans.size(); ++i) {
    const Span& span = lane.spans[i];
    const bool outermost = parents[i] < 0;
    const Span* parent = outermost ? nullptr : &lane.spans[static_cast<std::size_t>(parents[i])];
    lines.add(text_of(span), during(span, parent), is_wait(span.kind), own[i]);
    const auto waits = waits_of(span.kind);
    for (int which = 0; which < summed_waits; ++which) {
      const char* what = waits[static_cast<std::size_t>(which)];
      if (what != nullptr && span.waited[which] > 0) lines.add(what, text_of(span), true, span.waited[which]);
    }
    if (outermost) totals.idle -= span.length();
  }
}

}  // namespace

std::vector<int> parents_of(const Lane& lane) {
  std::vector<int> parents(lane.spans.size(), -1);
  std::vector<int> open;
  for (const int i : in_order_of_begin(lane)) {
    const Span& span = lane.spans[static_cast<std::size_t>(i)];
    while (!open.empty() && lane.spans[static_cast<std::size_t>(open.back())].end <= span.begin) open.pop_back();
    if (!open.empty()) {
      const Span& outer = lane.spans[static_cast<std::size_t>(open.back())];
      if (span.end > outer.end) {
        throw std::logic_error(fmt::format("spans overlap in part: {} [{}, {}) and {} [{}, {})", text_of(outer), outer.begin,
                                           outer.end, text_of(span), span.begin, span.end));
      }
      parents[static_cast<std::size_t>(i)] = open.back();
    }
    open.push_back(i);
  }
  return parents;
}

std::vector<std::int64_t> own_times(const Lane& lane) {
  std::vector<std::int64_t> own;
  for (const Span& span : lane.spans)
    own.push_back(span.length() - std::accumulate(span.waited, span.waited + summed_waits, std::int64_t{0}));
  const std::vector<int> parents = parents_of(lane);
  for (std::size_t i = 0; i < parents.size(); ++i) {
    if (parents[i] >= 0) own[static_cast<std::size_t>(parents[i])] -= lane.spans[i].length();
  }
  return own;
}

Totals totals_of(const Trace& trace) {
  Totals totals;
  struct Found {
    RoleTotals totals;
    Lines lines;
    std::set<LaneName> names;
  };
  std::map<std::tuple<int, std::string, Role>, Found> roles;
  std::int64_t first = trace.empty() ? 0 : trace.front().begin;
  std::int64_t last = first;
  for (const Lane& lane : trace) {
    const std::string kernel = lane.kernel == nullptr ? "" : lane.kernel;
    Found& found = roles[{lane.name.launch, kernel, lane.name.role}];
    found.totals.role = lane.name.role;
    found.totals.kernel = kernel;
    found.names.insert(lane.name);
    add_lane(lane, found.totals, found.lines);
    totals.spans += static_cast<std::int64_t>(lane.spans.size());
    totals.lost += lane.lost;
    first = std::min(first, lane.begin);
    last = std::max(last, lane.end);
  }
  totals.nanoseconds = last - first;
  for (auto& [key, found] : roles) {
    found.totals.lanes = static_cast<int>(found.names.size());
    found.totals.lines = found.lines.take();
    totals.roles.push_back(std::move(found.totals));
  }
  return totals;
}

}  // namespace heddle::trace
