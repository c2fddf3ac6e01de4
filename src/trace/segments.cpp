#include "trace/segments.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "trace/totals.hpp"
#include "trace/words.hpp"

namespace heddle::trace {

namespace {

/// Which spans are right inside of which, in the order of time.
std::vector<std::vector<int>> children_of(const Lane& lane, const std::vector<int>& parents) {
  std::vector<std::vector<int>> children(parents.size());
  for (std::size_t i = 0; i < parents.size(); ++i) {
    if (parents[i] >= 0) children[static_cast<std::size_t>(parents[i])].push_back(static_cast<int>(i));
  }
  const auto earlier = [&](int a, int b) {
    return lane.spans[static_cast<std::size_t>(a)].begin < lane.spans[static_cast<std::size_t>(b)].begin;
  };
  for (std::vector<int>& of_one : children) std::sort(of_one.begin(), of_one.end(), earlier);
  return children;
}

class Walk {
 public:
  Walk(const Lane& lane, std::vector<Segment>& segments)
      : lane_(lane), children_(children_of(lane, parents_of(lane))), segments_(segments) {}

  void visit(int i, bool of_shared) {
    const Span& span = lane_.spans[static_cast<std::size_t>(i)];
    of_shared |= span.kind == Kind::shared;
    std::int64_t at = span.begin;
    for (const int child : children_[static_cast<std::size_t>(i)]) {
      add(at, lane_.spans[static_cast<std::size_t>(child)].begin, span, of_shared);
      visit(child, of_shared);
      at = lane_.spans[static_cast<std::size_t>(child)].end;
    }
    add(at, span.end, span, of_shared);
  }

 private:
  void add(std::int64_t begin, std::int64_t end, const Span& span, bool of_shared) {
    if (end > begin) segments_.push_back({begin, end, &span, of_shared});
  }

  const Lane& lane_;
  std::vector<std::vector<int>> children_;
  std::vector<Segment>& segments_;
};

}  // namespace

std::vector<Segment> segments_of(const Lane& lane) {
  std::vector<Segment> segments;
  Walk walk(lane, segments);
  const std::vector<int> parents = parents_of(lane);
  for (std::size_t i = 0; i < parents.size(); ++i) {
    if (parents[i] < 0) walk.visit(static_cast<int>(i), false);
  }
  std::stable_sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  return segments;
}

std::string text_of(const LaneName& lane) {
  if (lane.cta < 0) return lane.role == Role::rank ? name(lane.role) : fmt::format("{} {}", name(lane.role), lane.number);
  return fmt::format("CTA {} {} {}", lane.cta, name(lane.role), lane.number);
}

}  // namespace heddle::trace
