// How roles, kinds and waits are called, in tables, files and pictures. Stable names: docs/json.md lists them.
#pragma once

#include <array>
#include <string>

#include "trace/span.hpp"

namespace heddle::trace {

const char* name(Role role);
const char* name(Kind kind);
const char* name(Product product);  ///< "" where there is none

/// What was done: "products of gemm1"; of a wait what for: "arrived rows of ring block".
std::string text_of(const Span& span);
/// What its summed waits were for; null where there are none of that place.
std::array<const char*, summed_waits> waits_of(Kind kind);

}  // namespace heddle::trace
