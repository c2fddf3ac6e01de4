// A trace as a picture: the strips of the fused-kernel article's Figures 2 and 9, time from left to right.
#pragma once

#include <span>
#include <string>

#include "trace/segments.hpp"

namespace heddle::trace {

/// An SVG. For every call, one below the other and all to one scale of time, a row a lane, coloured by what is innermost at the
/// time; grey from below the share that a span waited without leaving it. Under them two strips: how many of the lanes that
/// multiply do, and how many of those that move rows do. Lanes of the first `ctas` CTAs are drawn, the strips are of all.
std::string strips(std::span<const TracedCall> calls, int ctas);

}  // namespace heddle::trace
