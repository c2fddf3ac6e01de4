// A lane as a line of pieces that follow each other: at every moment the innermost span, if there is one.
#pragma once

#include <string>
#include <vector>

#include "trace/span.hpp"

namespace heddle::trace {

struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const Span* span = nullptr;
  bool of_shared = false;  ///< within a span of Kind::shared
};

/// In the order of time, without what is idle. Valid while the lane lives.
std::vector<Segment> segments_of(const Lane& lane);

/// "tasks 1", or on GPUs "CTA 3 math 0".
std::string text_of(const LaneName& name);

/// One call of a layer, traced.
struct TracedCall {
  std::string title;
  int ranks = 1;
  Trace lanes;
};

/// Whether a lane is among those to be shown: of a thread, or of the first `ctas` CTAs of a kernel.
inline bool is_shown(const Lane& lane, int ctas) { return lane.name.cta < ctas; }

}  // namespace heddle::trace
